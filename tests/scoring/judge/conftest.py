"""`serve(act, ...)`: a judge that answers as a test wants."""

from support.judges import serve

__all__ = ["serve"]
