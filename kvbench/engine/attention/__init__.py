"""Attention of a model under the engine: `interface` is registered with transformers, the rest is arithmetic."""
