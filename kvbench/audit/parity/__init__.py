"""Parity: checks whether kvbench's methods decide as the published reference code does (docs/parity.md)."""
