"""The audits of `kvbench audit`: invariants of methods, parity with published code, hostile programs, scorers.

The audit of the sandbox runs hostile programs in it; the audit of the scorers compares them with recorded results of
the official scorers. May import every package below it; only the command `audit` imports this one.
"""
