"""The configuration of a run: the sources of its settings (`layers`), their parsers, plug-ins and suites.

This package imports the registry, tasks and methods, whose names and options it needs, but never the engine. Imports no
torch.
"""
