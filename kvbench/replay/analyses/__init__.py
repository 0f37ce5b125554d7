"""Analyses from the papers, one per file. They study attention, or the entries that methods keep (docs/analyses.md)."""
