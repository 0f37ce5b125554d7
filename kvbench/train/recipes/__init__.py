"""Recipes of `kvbench train`, a file per trained method: the tensors that are trained, and the loss of a step."""
