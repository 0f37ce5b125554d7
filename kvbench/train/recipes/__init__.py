"""The recipes of `kvbench train`. A recipe says which tensors are trained, and with what loss."""
