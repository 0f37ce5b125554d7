"""Arithmetic that several methods share, one term per file, each with its paper and equation."""
