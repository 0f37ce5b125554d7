"""Finds, reads and checks inputs: model folders, the hub, task data. Loads no weights and no torch.

Imports `console`, and from `store` only the reader for JSON that may be malformed or hostile.
"""
