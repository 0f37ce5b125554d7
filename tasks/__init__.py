"""One file per task. A new file here is registered by its decorator; nothing else is edited."""
