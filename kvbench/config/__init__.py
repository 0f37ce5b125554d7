"""The configuration of a run: the sources of its settings (`layers`), parsers, plug-ins and suites.

Imports the registry, tasks and methods for their names and options, never the engine. Imports no torch.
"""
