"""kvbench inside other tools."""

from pathlib import Path

TASKS = Path(__file__).parent / "lm_eval_tasks"  # kvbench's tasks as YAML files of lm-eval
