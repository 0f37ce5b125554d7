"""Training of learned methods and of the built-in model. `prepare` sets up a recipe, `loop` trains it.

Imports the engine, and replay to read answers again. Packages below it read the files it writes, but import no code.
"""
