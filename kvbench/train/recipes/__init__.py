"""The recipes of `kvbench train`. A recipe says which tensors are trained, and with what loss.

docs/training.md and, for `duo`, docs/head-tables.md describe the settings (`Settings.more`) and held-out figures.
"""
