"""A model's attention, as the engine computes it. `interface` has the function that transformers calls in every
attention layer.

The other modules read a model's layers (`geometry`) and RoPE (`rope`), check that the model works under the engine
(`positions`), convert latent attention (`latent`), compute attention with torch's SDPA (`sdpa`, `kernel_choice`) or
flash-attn (`flash`), and count the bytes that attention takes (`meta_attention`).
"""
