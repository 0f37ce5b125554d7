"""Exports the trained built-in model as a folder for transformers; measures its accuracy with the exported files."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from kvbench.taskkit.synthetic.variants import VARIANTS
from kvbench.taskkit.synthetic.vocabulary import END_ID, PAD_ID
from kvbench.train.tiny.evaluate import solve, summary
from kvbench.train.tiny.tokenizer import build_tokenizer
from kvbench.train.tiny.trainer import Trainer

PACKAGES = ("torch", "transformers", "numpy")


def export(trainer: Trainer, folder: Path, n_problems: int) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    trainer.model.generation_config = GenerationConfig(do_sample=False, eos_token_id=END_ID, pad_token_id=PAD_ID)
    trainer.model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder, save_jinja_files=False)
    card = describe(trainer, folder) | {"accuracy": accuracy(folder, n_problems)}
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors creates files that only the owner can read
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    return card


def accuracy(folder: Path, n_problems: int) -> dict[str, dict[str, float]]:
    """Return, for every variant of every synthetic task, how well the model solves held-out problems.

    A variant has three figures (`summary`): `exact` is the share of right answers; `partial` is the mean of a score
    from 0 to 1 that also counts partly right answers; `problems` is the number of problems. Answers are greedy, with
    the full cache. n_problems: problems per variant.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {name: summary(solve(model, tokenizer, variant, n_problems)) for name, variant in VARIANTS.items()}


def describe(trainer: Trainer, folder: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "what": "a test instrument for KV-cache eviction, trained on synthetic text only; it knows no natural language",
        "license": "Apache-2.0",
        "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
        "data": "kvbench.taskkit.synthetic, drawn from 40-bit seeds while training; levels: kvbench/train/tiny/data.py",
        "command": f"python -m kvbench.train.tiny --out OUT --seed {trainer.seed} --steps-scale {trainer.scale}",
        "recipe": trainer.recipe(),
        "steps": trainer.step,
        "tokens": trainer.tokens,
        "seconds": round(trainer.seconds),
        "threads": torch.get_num_threads(),
        "climbs": trainer.climbs,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    }
