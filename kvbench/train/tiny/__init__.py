"""Training of the built-in model: data, tokenizer, initial weights, training loop (`python -m kvbench.train.tiny`)."""
