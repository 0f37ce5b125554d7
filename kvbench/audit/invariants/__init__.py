"""Invariants: rules that must hold for every method. The audit checks them on answers that a small model generates.

`generation`, `effect`, `queries` and `storage` state the invariants, `checks` lists and runs them, `exam` makes the
generations.
"""
