"""The rulebook: what a method declares (`declare`), sees (`view`) and answers (`api.Method`), and how scores become
kept entries (`select`). Imports errors, registry and console only. `terms`: arithmetic that several methods share.
"""
