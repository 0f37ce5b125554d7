"""kvbench examined by others' rules: invariants of methods, parity with published code, hostile programs, scorers.

May import every lower room; only the command `audit` imports this one.
"""
