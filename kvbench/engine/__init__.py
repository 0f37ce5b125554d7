"""Generation with eviction: the only code that moves KV entries. Start reading at `loop.Engine`.

Imports the methods' interface (`eviction`) and model folders (`sources`), but no task or scoring code.
"""
