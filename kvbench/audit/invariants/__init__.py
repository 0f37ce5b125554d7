"""What every method must hold on real generations of small models.

`generation`, `queries` and `storage` state the invariants, `exam` makes the generations, `checks` runs them all.
"""
