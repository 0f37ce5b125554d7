"""Finds, reads and checks inputs: model folders, the hub, task data. Loads no weights and no torch.

Imports `console`, and from `store` only small readers and writers of files, such as `strict_json`.
"""
