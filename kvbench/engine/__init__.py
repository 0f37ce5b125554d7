"""Generation with eviction: the only code that moves KV entries. Start reading at `loop.Engine`.

Imports the rulebook (`eviction`) and model folders (`sources`); knows no task, no score and no results folder.
"""
