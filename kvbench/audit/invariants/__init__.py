"""Invariants: rules that must hold for every method. They are checked while a small model generates answers with it.

`generation`, `effect`, `queries` and `storage` state the invariants, `checks` lists and runs them, `exam` makes the
generations.
"""
