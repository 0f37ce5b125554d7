"""One file per task. The decorator in a new file registers its task; no other file needs a change."""
