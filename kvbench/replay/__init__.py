"""Teacher-forced replay: methods read finished answers again; their predictions are compared with the full cache's.

Imports the engine and the runner's workload. docs/replay.md describes the figures.
"""
