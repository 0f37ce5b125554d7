"""Training of the built-in model: data, tokenizer, starting weights, loop (`python -m kvbench.train.tiny`)."""
