"""Generators and scorers of synthetic problems for the built-in model. They handle text only; no torch.

`walk`, `chain` and `lookup` each have settings (`Knobs`), `generate(seed, knobs)` and `score(problem, output)`.
`variants` names the settings that tasks use.
"""
