"""kvbench examined by others' rules: invariants of methods, parity with published code, hostile programs, scorers.

Imports every room below the command line; the command `audit` alone imports this room.
"""
