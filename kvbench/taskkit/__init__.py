"""What task files share: task names, prompts, context templates, base classes, RULER's and the synthetic generators.

Imports scorers and sources; no torch.
"""
