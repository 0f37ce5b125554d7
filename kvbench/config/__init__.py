"""The configuration of a run, with the layers that it is gathered from, parsers, plug-ins and suites.

Imports the registry, tasks and methods for their names and options, never the engine. Imports no torch.
"""
