"""Runs vLLM in a process of its own: `python -m kvbench.runner.bench.vllm_process` reads a job from stdin.

vLLM keeps its GPU memory until its process ends, so no other system could be measured in the same process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from kvbench.errors import KVBenchError

SHARE = 0.45  # of the GPU's memory: the measured model and its cache lie beside it


def vllm_seconds(folder: Path, ids: torch.Tensor, tokens: int, dtype: str) -> float:
    """Return the wall seconds in which vLLM generates `tokens` tokens after each prompt of ids [sequences, prompt].

    folder: of the model. The time excludes loading and one warm-up. Raises KVBenchError when the process fails.
    """
    job = {"folder": str(folder), "ids": ids.tolist(), "tokens": tokens, "dtype": dtype}
    done = subprocess.run(
        [sys.executable, "-m", "kvbench.runner.bench.vllm_process"],
        input=json.dumps(job),
        text=True,
        stdout=subprocess.PIPE,
    )
    if done.returncode:
        raise KVBenchError("the process that measures vLLM ended without a result; its message is above.")
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    prompts = [{"prompt_token_ids": row} for row in job["ids"]]
    model = LLM(
        model=job["folder"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        max_model_len=len(job["ids"][0]) + job["tokens"],
        max_num_seqs=len(prompts),
        gpu_memory_utilization=SHARE,
        enable_prefix_caching=False,
    )

    def generate(tokens: int) -> None:
        model.generate(
            prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False), use_tqdm=False
        )

    generate(min(8, job["tokens"]))
    began = time.perf_counter()
    generate(job["tokens"])
    print(json.dumps({"seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
