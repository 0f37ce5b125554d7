"""The recipes of `kvbench train`, a file for each: which tensors it trains, and with what loss."""
