"""Training of learned methods, of models that work with an evicted cache, and of the built-in model. The module
`prepare` sets up a recipe; the module `loop` trains it.

The package imports `kvbench.engine`, which generates answers, and `kvbench.replay`, which reads answers again. The
engine reads the weights files that training writes.
"""
