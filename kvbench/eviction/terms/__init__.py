"""Arithmetic that several methods share: one term per file, with paper and equation."""
