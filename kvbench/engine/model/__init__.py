"""A model in memory: loading it, its shape, its fingerprint, packed linear layers, and weights that methods need."""
