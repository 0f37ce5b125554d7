"""The share of decoding time that evictions take, per method. Run as a script.

    cd tests && OMP_NUM_THREADS=1 python -m support.eviction_cost --interval 128 gkv rkv tova

Random weights of bench's shape A, budget 128, 32 sequences, prompts of 64 tokens. Times are CPU seconds of the process:
of `Evictor.tick` and `Evictor.mark`, and of `Engine.generate` without the prompts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from kvbench.engine.evict import Evictor
from kvbench.engine.loop import Engine
from kvbench.engine.prefill import PromptReader
from kvbench.eviction.choose import from_label
from kvbench.records import Request
from kvbench.runner.bench.setting import Setting, build


class Watch:
    """CPU seconds spent in methods of the engine."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def on(self, owner: type, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + time.process_time() - began
                self.calls[name] = self.calls.get(name, 0) + 1

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--shape", default="A")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = build(Setting(shape=args.shape))
    from support.methods import with_tables

    loaded = with_tables(loaded)
    watch = Watch()
    watch.on(Evictor, "tick")
    watch.on(Evictor, "mark")
    watch.on(PromptReader, "read")
    print("| method | ms per eviction | share of decoding |\n| --- | --- | --- |")
    generator = torch.Generator().manual_seed(1)
    for label in args.methods:
        shares, each = [], []
        for _ in range(args.repeats):
            ids = torch.randint(5, 4000, (args.sequences, 64), generator=generator).tolist()
            todo = [
                Request(task="cost", doc_id=str(i), prompt_ids=tuple(row), max_new_tokens=args.new_tokens)
                for i, row in enumerate(ids)
            ]
            engine = Engine(
                loaded,
                from_label(label),
                budget=args.budget,
                interval=args.interval,
                slots=args.sequences,
                max_tokens=64 + args.new_tokens,
            )
            watch.spent.clear()
            watch.calls.clear()
            began = time.process_time()
            list(engine.generate(todo))
            decoding = time.process_time() - began - watch.spent["read"]
            evicting = watch.spent.get("tick", 0.0) + watch.spent.get("mark", 0.0)
            shares.append(evicting / decoding)
            each.append(1e3 * evicting / max(1, watch.calls.get("tick", 0)))
        print(f"| {label} | {min(each):.1f} | {sorted(shares)[len(shares) // 2]:.1%} |", flush=True)


if __name__ == "__main__":
    main()
