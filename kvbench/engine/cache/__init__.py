"""KV memory. `slot_cache` is the interface of the slots, `dense` and `paged` are its two layouts. `prompt` holds a
prompt's entries while the model reads the prompt."""
