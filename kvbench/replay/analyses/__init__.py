"""Analyses from the papers, one file each: of attention, and of the entries that methods keep (docs/analyses.md)."""
