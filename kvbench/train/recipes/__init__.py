"""One trained method per file: which tensors are trained, and the loss of a step."""
