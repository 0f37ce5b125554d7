"""Invariants that must hold for every method in generations of small models.

`generation`, `queries` and `storage` state the invariants, `checks` lists and runs them, `exam` makes the generations.
"""
