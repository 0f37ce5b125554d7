"""Teacher-forced replay: methods read a finished sequence again, and their predictions are compared with the full
cache's. See docs/replay.md.
"""
