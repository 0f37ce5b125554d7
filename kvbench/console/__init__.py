"""The process and its person: terminal, progress, problems, redacted secrets, signals, failures of the system.

Imports `kvbench.errors` alone; every other room may import this one.
"""
