"""Finds, reads and checks inputs: model folders, the hub, task data. Loads no weights and no torch.

Imports console and the store's reader of foreign JSON.
"""
