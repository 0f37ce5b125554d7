"""One file per eviction method. Its decorator registers the method, so a new method needs no change elsewhere."""
