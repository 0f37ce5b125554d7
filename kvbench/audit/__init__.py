"""Audits of kvbench: invariants of methods, parity with published code, hostile programs, recorded results of scorers.

May import every package below it; only the command `audit` imports this one.
"""
