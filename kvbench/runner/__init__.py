"""One run from its plan to its rows: `execute` plans it, `session` drives it cell by cell, `rows` says what is kept.

Imports the engine, tasks, scorers and the store.
"""
