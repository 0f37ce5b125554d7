"""Tables over runs: rows become cells, cells become statements with error bars (`stats`), statements become text,
figures (`plots`) and one HTML page (`page`).

Reads through `store`; imports neither the engine nor torch.
"""
