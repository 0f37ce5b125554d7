"""Analyses from the papers, one per file: of attention, and of the entries that methods keep. See docs/analyses.md."""
