"""What a user asks for: the configuration of a run, the layers it is gathered from, parsers, plug-ins, suites.

Imports names (registry, tasks, methods' options), never the engine. Free of torch.
"""
