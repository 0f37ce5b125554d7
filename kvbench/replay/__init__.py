"""Teacher-forced replay: methods read a finished sequence again, and predictions are compared with the full cache.

Imports the engine and the runner's workload. docs/replay.md describes the figures.
"""
