"""Measures a model's accuracy on the synthetic tasks, without kvbench's engine.

    python -m kvbench.train.tiny.evaluate [--model FOLDER] [--problems 128] [--variants orbit-300 chain-4]

Transformers' `generate` answers greedily with the full cache. The program prints one line per variant of a task, then
one JSON document. The problems of a variant have equal length, so a batch needs no padding.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbench import tiny
from kvbench.taskkit.synthetic.problem import HELD_OUT, Score
from kvbench.taskkit.synthetic.variants import VARIANTS, Variant

SLACK = 8  # tokens that an answer may exceed the solution by: one that does not stop in time counts as wrong


@torch.inference_mode()
def solve(model: Any, tokenizer: Any, variant: Variant, n_problems: int) -> list[Score]:
    """Let the model solve `n_problems` held-out problems of a variant; return their scores."""
    problems = [variant.generate(HELD_OUT + i) for i in range(n_problems)]
    prompts = tokenizer([p.prompt for p in problems], return_tensors="pt")["input_ids"]  # [problems, prompt]
    length = prompts.shape[1]
    limit = len(problems[0].solution_pieces) + 1 + SLACK
    mask = torch.ones_like(prompts)
    output = model.generate(prompts, attention_mask=mask, max_new_tokens=limit, do_sample=False)[:, length:]
    texts = tokenizer.batch_decode(output)  # the scorers ignore padding: they read up to the end token
    return [variant.score(problem, text) for problem, text in zip(problems, texts, strict=True)]


def summary(scores: list[Score]) -> dict[str, float]:
    n = len(scores)
    return {
        "exact": round(sum(score.exact for score in scores) / n, 4),
        "partial": round(sum(score.partial for score in scores) / n, 4),
        "problems": n,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvbench.train.tiny.evaluate", description="Full-cache accuracy")
    parser.add_argument("--model", type=Path, default=tiny.path(), help="a model folder; default: the built-in model")
    parser.add_argument("--problems", type=int, default=128, help="problems per variant of a task")
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="variants of tasks; default: all"
    )
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    results = {}
    for name in args.variants:
        started = time.perf_counter()
        results[name] = means = summary(solve(model, tokenizer, VARIANTS[name], args.problems))
        seconds = time.perf_counter() - started
        print(f"{name:10}  exact {means['exact']:.3f}  partial {means['partial']:.3f}  {seconds:.1f} s", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
