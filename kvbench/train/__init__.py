"""Training of learned methods and of the built-in model. `prepare` sets up a recipe, `loop` trains it.

Imports the engine, and replay to read answers again. Packages below `train` read the files that it writes, but do not
import it.
"""
