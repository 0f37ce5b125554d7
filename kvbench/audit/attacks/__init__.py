"""Runs hostile programs in every tier of the sandbox, and checks that none does harm or reads a secret.

`corpus` runs all programs, `grader` runs one, `watch` observes the process that runs it.
"""
