"""Code for the decode step on a GPU: attention, sampling, compiled layers. Only the engine and `bench` import it.

Modules that need triton are imported only when a GPU decodes, because CPU builds of torch come without triton.
"""
