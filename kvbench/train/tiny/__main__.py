"""Train the built-in model: first on the tasks `chain` and `lookup`, then also on `walk` with steps of one line, then
also on `walk` with steps of one digit.

    OMP_WAIT_POLICY=PASSIVE python -m kvbench.train.tiny --out runs/tiny [--seed 0] [--threads 2] [--steps-scale 1.0]

After a kill the same command continues from the last checkpoint. The losses are the same if machine, thread count and
torch version are the same. At the end `--out` holds `model/`, a folder for AutoModelForCausalLM and AutoTokenizer. The
file `card.json` in it has recipe, steps, tokens, versions, and accuracy on held-out problems. `log.jsonl` has a line
per step. `--steps-scale` multiplies the number of steps of every stage.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from kvbench.errors import KVBenchError
from kvbench.taskkit.synthetic.problem import FORM, KINDS
from kvbench.train.loop import forget_after
from kvbench.train.tiny.card import export
from kvbench.train.tiny.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvbench.train.tiny", description="Train the built-in model")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, log and the finished model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the data")
    parser.add_argument("--threads", type=int, default=2, help="processor threads")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="factor for the steps of every stage")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens per batch")
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS", help="steps between two checkpoints")
    parser.add_argument(
        "--print-every", type=int, default=50, metavar="STEPS", help="steps between two lines of progress"
    )
    parser.add_argument(
        "--problems", type=int, default=128, help="held-out problems per task variant for the accuracy on the card"
    )
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args.seed, args.steps_scale, args.batch_tokens)
    try:
        train(trainer, args.out, args.save_every, args.print_every)
    except KVBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(json.dumps(export(trainer, args.out / "model", args.problems)["accuracy"]))


def train(trainer: Trainer, out: Path, save_every: int, print_every: int) -> None:
    checkpoint, log_path = out / "checkpoint.pt", out / "log.jsonl"
    if checkpoint.exists():
        trainer.restore(checkpoint)
        forget_after(trainer.step, log_path)
    newest: list[dict] = []
    with log_path.open("a") as log:
        while trainer.step < trainer.total:
            started = time.perf_counter()
            row = trainer.train_step()
            row["seconds"] = time.perf_counter() - started
            trainer.seconds += row["seconds"]
            newest.append(row)
            log.write(json.dumps(row) + "\n")
            last = trainer.step == trainer.total
            if last or trainer.step % print_every == 0:
                print(progress(trainer, newest), file=sys.stderr, flush=True)
                newest = []
            if last or trainer.step % save_every == 0:
                log.flush()
                trainer.save(checkpoint)


def progress(trainer: Trainer, newest: list[dict]) -> str:
    """Return a line for the terminal: progress, speed, and each task's level, mean loss and accuracy by kind of token.
    newest: the lines of the log since the last printed line; a task without a line among them is left out."""
    speed = sum(row["tokens"] for row in newest) / sum(row["seconds"] for row in newest)
    done = f"{trainer.step}/{trainer.total} {newest[-1]['stage']} {trainer.tokens / 1e6:.2f} M tokens"
    parts = [f"{done} {trainer.seconds:.0f} s {speed:.0f} tokens/s"]
    for task, level in trainer.ladder.level.items():
        rows = [row for row in newest if row["task"] == task]
        if rows:
            kinds = [kind for kind in KINDS if kind in rows[0]["right"] and kind != FORM]
            shares = " ".join(f"{kind} {np.mean([row['right'][kind] for row in rows]):.3f}" for kind in kinds)
            parts.append(f"{task} level {level} loss {np.mean([row['loss'] for row in rows]):.3f} {shares}")
    return " | ".join(parts)


if __name__ == "__main__":
    main()
