"""Runs hostile programs in every tier of the sandbox, and checks that none does harm or reads a secret.

`corpus` runs all programs, `grader` is the process that runs one of them, `watch` observes this process.
"""
