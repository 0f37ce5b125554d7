"""Hostile programs in every tier of the sandbox: `corpus` runs them all, `grader` runs one, `watch` observes."""
