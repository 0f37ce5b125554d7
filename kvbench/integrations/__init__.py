"""kvbench inside other tools (a model for lm-eval, a cache for transformers' `generate`), and kvpress inside kvbench.

Imports the engine, the packages below it, `runner.cell` and `runner.spool`.
"""

from pathlib import Path

TASKS = Path(__file__).parent / "lm_eval_tasks"  # kvbench's tasks as YAML files of lm-eval
