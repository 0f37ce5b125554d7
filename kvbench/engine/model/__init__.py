"""A model in memory: loading it, its shape, its fingerprint, packed weights, and weights that methods bring along."""
