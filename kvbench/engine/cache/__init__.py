"""KV memory: `slot_cache` is the interface, `dense` and `paged` the layouts, `prompt` a prompt being read."""
