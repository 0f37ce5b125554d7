"""The scorer presses of kvpress (NVIDIA) as methods ``kvpress:NAME``. Imports `eviction`; the engine knows no press."""
