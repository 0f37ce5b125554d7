"""Code that task files share: task names, prompts, context templates, base classes, and generators.

The generators make the prompts of RULER and of the synthetic tasks. Imports scorers and sources; no torch.
"""
