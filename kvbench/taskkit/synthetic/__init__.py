"""Synthetic problems for the built-in model: text in, text out, no torch.

`walk`, `chain` and `lookup` each have knobs, `generate(seed, knobs)` and `score(problem, output)`.
`variants` names the settings that were measured.
"""
