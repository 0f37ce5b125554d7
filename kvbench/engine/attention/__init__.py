"""A model's attention, as the engine computes it. `interface` has the function that transformers calls in every
attention layer.

`geometry` reads a model's layers, and `rope` its RoPE. `positions` checks that the model works under the engine.
`latent` converts latent attention. `grouped` computes attention with matrix products or torch's SDPA (`sdpa`), `flash`
with flash-attn.
"""
