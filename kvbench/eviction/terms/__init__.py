"""Arithmetic and base classes of methods, one subject per file; most files name their paper."""
