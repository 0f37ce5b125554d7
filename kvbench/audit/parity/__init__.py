"""Parity: whether kvbench's methods decide as the published reference code does. See docs/parity.md."""
