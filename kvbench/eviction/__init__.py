"""The rulebook: what a method declares, what it sees, and how scores become kept entries. Start at `api.Method`.

Imports errors, registry and console only. `terms` holds arithmetic that several methods share.
"""
