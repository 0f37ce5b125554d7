"""The engine: the only code that moves KV entries. Start reading at `loop.Engine`."""
