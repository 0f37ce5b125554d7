"""Replay: the model reads finished answers again under each method (teacher forcing).

At every token, the model's prediction under the method is compared with its prediction with the full cache.
docs/replay.md describes the figures. The package imports the engine, the runner and the report, and packages below
them.
"""
