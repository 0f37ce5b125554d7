"""Teacher-forced replay: the model reads finished answers again under each method.

At every token, the model's prediction under the method is compared with its prediction with the full cache. Imports the
engine and the runner's workload. docs/replay.md describes the figures.
"""
