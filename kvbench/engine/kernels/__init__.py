"""Code for the decode step on a GPU: attention, sampling, compiled layers. Only `engine` imports this folder.

Modules that need triton are imported when a GPU decodes, because CPU builds of torch come without triton.
"""
