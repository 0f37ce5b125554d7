"""Analyses of the papers, one a file: what attention looks like, and what methods do to it. See docs/analyses.md."""
