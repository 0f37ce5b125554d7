"""Runs hostile programs in every tier of the sandbox that works here, and checks that no program does harm or reads a
secret.

`corpus` runs all programs, `grader` is the process that runs one of them, `watch` observes this process.
"""
