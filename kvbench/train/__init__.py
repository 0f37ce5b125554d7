"""Training of learned methods and of the built-in model. `prepare` sets up a recipe, `loop` trains it.

Imports the engine, and replay to read answers again. Lower rooms read its files and import none of its code.
"""
