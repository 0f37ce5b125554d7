"""Generators and scorers of synthetic text problems for the built-in model. Imports no torch.

`walk`, `chain` and `lookup` each have settings (`Knobs`), `generate(seed, knobs)` and `score(problem, output)`.
`variants` names the settings that tasks use.
"""
