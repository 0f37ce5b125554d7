"""Talks to user and system: terminal, progress, problems, redacted secrets, signals, failures of the system.

Imports `kvbench.errors` alone; every other package may import `console`.
"""
