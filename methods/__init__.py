"""One file per eviction method. The decorator in a file registers it, so that a new method edits no other file."""
