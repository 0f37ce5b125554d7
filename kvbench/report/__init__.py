"""Tables over runs: rows become cells, cells become statements with error bars (`stats`), statements become text and
figures (`plots`).

Reads through `store`; imports neither the engine nor torch.
"""
