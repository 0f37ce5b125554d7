"""The built-in model: its data, tokenizer, starting weights and training (`python -m kvbench.train.tiny`)."""
