"""KV caches. `prompt` is the cache of a prompt while the model reads it. `slot_cache` is the interface of the cache for
decoding; `dense` and `paged` are its two layouts."""
