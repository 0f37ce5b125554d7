"""What every method must hold on real generations of small models.

`generation`, `queries` and `storage` state the invariants, `case` makes the generations, `checks` runs them all.
"""
