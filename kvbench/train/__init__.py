"""Training of learned methods and of the built-in model. The module `prepare` sets up a recipe; the module
`loop` trains it.

Imports `kvbench.engine`, which generates answers, and `kvbench.replay`, which reads answers again. The engine reads the
weights files that training writes.
"""
