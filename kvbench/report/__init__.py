"""Makes reports on runs. Rows are grouped into cells, and cells are compared statistically (`stats`).

The results are printed as text, drawn as figures (`plots`) or put into one HTML page (`page`). This package reads runs
through `store`; it imports neither the engine nor torch.
"""
