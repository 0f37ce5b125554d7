"""Teacher-forced replay: the model reads finished answers again under each method.

The predictions are compared with those of the full cache.

Imports the engine and the runner's workload. docs/replay.md describes the figures.
"""
