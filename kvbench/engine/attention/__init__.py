"""A model's attention under the engine: `interface` plugs into transformers; geometry, RoPE, positions, flash-attn."""
