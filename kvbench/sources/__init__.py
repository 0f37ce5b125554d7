"""Where inputs come from: model folders, the hub, task data. Reads and checks; loads no weights and no torch.

Imports console and the store's reader of foreign JSON.
"""
