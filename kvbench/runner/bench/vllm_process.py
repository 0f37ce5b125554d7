"""Runs vLLM in a separate process: `python -m kvbench.runner.bench.vllm_process` reads what to generate from stdin.

vLLM keeps its GPU memory until its process ends, so no other system could be measured in the same process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kvbench.errors import KVBenchError

RESULT = "kvbench-result.json"
SHARE = 0.45  # vLLM's share of the GPU's memory; the other systems' model and cache stay on the GPU meanwhile


def vllm_seconds(folder: Path, ids: torch.Tensor, tokens: int, dtype: str) -> float:
    """Return the wall seconds in which vLLM generates `tokens` tokens after each prompt of ids [sequences, prompt].

    folder: the model's folder; the process also writes its result there. The time excludes loading and one warm-up.
    Raises RuntimeError with vLLM's message if vLLM fails, KVBenchError if its process ends without a result.
    """
    job = {"folder": str(folder), "ids": ids.tolist(), "tokens": tokens, "dtype": dtype}
    subprocess.run([sys.executable, "-m", "kvbench.runner.bench.vllm_process"], input=json.dumps(job), text=True)
    try:
        result = json.loads((folder / RESULT).read_text())
    except FileNotFoundError:
        cure = "Its output above may say why. To measure the other systems, leave vllm out of --baseline."
        raise KVBenchError(f"the process that measures vLLM ended without a result. {cure}") from None
    if "error" in result:
        raise RuntimeError(f"vLLM: {result['error']}")
    return float(result["seconds"])


def main() -> None:
    """Read from stdin what to generate, run vLLM, and write the wall seconds or an error to the model's folder."""
    job = json.load(sys.stdin)
    try:
        result: dict[str, Any] = {"seconds": _seconds(job)}
    except Exception as error:  # vLLM may raise any exception
        result = {"error": f"{type(error).__name__}: {error}"}
    Path(job["folder"], RESULT).write_text(json.dumps(result))


def _seconds(job: dict[str, Any]) -> float:
    from vllm import LLM, SamplingParams

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

    def generate(tokens: int) -> int:
        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        answers = model.generate(prompts, parameters, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    generate(min(8, job["tokens"]))
    began = time.perf_counter()
    generated = generate(job["tokens"])
    seconds = time.perf_counter() - began
    if generated != len(prompts) * job["tokens"]:
        raise ValueError(f"vLLM generated {generated} tokens instead of {len(prompts) * job['tokens']}")
    return seconds


if __name__ == "__main__":
    main()
