"""One run from its plan to its rows: `run_plan` plans it, `session` drives it cell by cell, `row_writer` writes it.

Imports the engine, tasks, scorers and the store.
"""
