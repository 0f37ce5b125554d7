"""A model's attention under the engine: `interface` has the function that transformers calls in every attention layer.

The other modules read a model's layers (`geometry`) and RoPE, check its positions, and call flash-attn."""
