"""Folders that tests read."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DATA = TESTS / "data"
SHARED = ROOT.parent / "shared"  # full collections, where they are at hand
