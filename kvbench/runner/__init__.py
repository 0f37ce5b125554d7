"""Runs a configuration: `run_plan` plans it, `session` generates it cell by cell, `row_writer` scores and writes its
rows.

Imports the engine, tasks, scorers and the store.
"""
