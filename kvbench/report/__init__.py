"""Tables over runs: rows are grouped into cells, cells are compared statistically (`stats`), and the results are
printed as text, drawn as figures (`plots`) or put into one HTML page (`page`).

Reads through `store`; imports neither the engine nor torch.
"""
