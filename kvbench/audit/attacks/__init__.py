"""Runs hostile programs in the sandbox, and checks that no program does harm or reads a secret.

`corpus` runs all programs, `grader` is the process that runs one of them, `watch` observes the grader.
"""
