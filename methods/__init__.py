"""One file per eviction method. A new file here is registered by its decorator; nothing else is edited."""
