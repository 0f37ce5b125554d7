"""The interface of eviction methods: what a method declares (`declare`), sees (`view`) and returns (`api.Method`), and
how scores become kept entries (`select`). `terms` holds arithmetic that several methods share. Of kvbench's other parts
it imports errors, registry, console and lazy only.
"""
