"""Talks to the terminal and the system: output, progress, collected errors, redacted secrets, signals.

Imports `kvbench.errors` only. Every other package may import `console`.
"""
