"""Invariants of methods: rules that must hold for every method whenever a small model generates answers with it.

`generation`, `queries` and `storage` state the invariants, `checks` lists and runs them, `exam` makes the generations.
"""
