"""Runs hostile programs in the sandbox, and checks that no program does harm or reads a secret.

Each program runs in every tier of the sandbox (a tier is one way to isolate a program) that works on this machine.
`corpus` runs all programs, `grader` is the process that runs one of them, `watch` observes the grader.
"""
