"""The interface of eviction methods: what a method declares (`declare`), sees (`view`) and returns (`api.Method`), and
how scores become kept entries (`select`). Imports errors, registry and console only. `terms` holds arithmetic that
several methods share.
"""
