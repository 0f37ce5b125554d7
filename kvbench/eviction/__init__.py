"""The interface of eviction methods: what a method declares (`declare`), sees (`view`) and returns (`api.Method`), and
how scores become kept entries (`select`). `terms` holds arithmetic that several methods share. From the rest of kvbench
the package imports only errors, registry, console and lazy.
"""
