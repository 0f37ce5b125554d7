"""A model's attention, as the engine computes it. `interface` has the function that transformers calls in every layer.

The other modules read a model's layers (`geometry`) and RoPE (`rope`), check that the model uses the engine's positions
(`positions`), and compute attention with torch's SDPA (`sdpa`) or flash-attn (`flash`)."""
