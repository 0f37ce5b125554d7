"""Hostile programs in every tier of the sandbox: `corpus` runs all, `grader` runs one, `watch` observes the grader."""
