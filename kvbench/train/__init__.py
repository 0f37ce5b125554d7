"""Training of learned methods and of the built-in model. The module `prepare` sets up a recipe; the module
`loop` trains it.

Imports the engine, to generate answers, and replay, to read answers again. The engine reads the weights files that
training writes.
"""
