"""Invariants that every eviction method must hold, checked on real generations of small models.

`invariants` states and judges them, `case` makes the generations they look at, `audit` runs all of it.
"""
