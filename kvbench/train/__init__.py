"""Training of learned methods and of the built-in model. `prepare` readies a recipe, `loop` trains it.

Imports the engine, and replay for answers that are read again. The rooms below know its files, never its code.
"""
