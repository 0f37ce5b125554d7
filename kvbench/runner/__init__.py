"""Runs a configuration: `run_plan` plans it, `session` generates cell by cell, `row_writer` scores and writes rows.

Imports the engine, tasks, scorers and the store.
"""
