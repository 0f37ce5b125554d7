"""Code that task files share: task names, prompts, context templates, base classes, and generators for RULER and the
synthetic tasks.

Imports scorers and sources; no torch.
"""
