"""A model's attention, as the engine computes it. `interface` has the function that transformers calls in every
attention layer.

`geometry` reads a model's layers, and `rope` its RoPE. `positions` checks that the model works under the engine.
`latent` converts latent attention. `sdpa` and `kernel_choice` compute attention with torch's SDPA, `flash` with
flash-attn. `meta_attention` counts the bytes that attention takes.
"""
