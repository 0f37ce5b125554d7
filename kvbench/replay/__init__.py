"""Teacher-forced replay: the model reads finished answers again under each method.

At every token its prediction is compared with the one that it makes with the full cache. Imports the engine and the
runner's workload. docs/replay.md describes the figures.
"""
