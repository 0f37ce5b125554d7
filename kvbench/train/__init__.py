"""Training: the built-in model (`tiny*`) and learned methods. Run as `python -m kvbench.train.<module>`."""
