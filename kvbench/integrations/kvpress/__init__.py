"""The scorer presses of kvpress (NVIDIA), which score entries for eviction, as methods ``kvpress:NAME``.

This package imports `eviction`; the engine does not know about presses.
"""
