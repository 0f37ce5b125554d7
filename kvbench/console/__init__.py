"""Everything between kvbench and the terminal or system: output, progress, collected errors, redacted secrets, signals.

Imports `kvbench.errors` only. Every other package may import `console`.
"""
