"""Models, prompts and options with which kvbench's decisions are compared with those of kvpress itself.

The entries that kvpress 0.5.5 keeps are stored in tests/data/kvpress/kept.json. kvpress needs transformers < 5.3 to run
by itself, and kvbench a later one, so an environment of its own records them, at the repository's root:

    python3.11 -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install kvpress==0.5.5 numpy rich
    PYTHONPATH=.:tests /tmp/kvpress/bin/python tests/support/presses.py > tests/data/kvpress/kept.json
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from typing import Any

import torch

from kvbench.eviction import noise

TOKENS, NOISE_KEY = 128, 7  # compression ratios are exact numbers at this length
SIZES = dict(
    **dict(hidden_size=48, intermediate_size=64, num_hidden_layers=3, vocab_size=160, max_position_embeddings=4096),
    **dict(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=None
    ),
)
CASES: dict[str, dict[str, Any]] = {
    "CURPress": {},
    "CapPress": {},
    "CompactorPress": {"chunk_size": 48},
    "CriticalKVPress": {"press": "SnapKVPress(window_size=8)"},
    "ExpectedAttentionPress": {"epsilon": 0.01},
    "KeyDiffPress": {},
    "KnormPress": {},
    "LagKVPress": {"lag_size": 31},
    "LeverageScorePress": {"sketch_dimension": 12},
    "NonCausalAttnPress": {"chunk_size": 50},
    "PyramidKVPress": {"window_size": 8, "beta": 2},
    "RandomPress": {},
    "SnapKVPress": {"window_size": 8},
    "StreamingLLMPress": {},
    "TOVAPress": {},
}
KINDS = ("llama", "qwen3")


def budget_of(press: str) -> int:
    """A budget at which no entries with equal scores compete: LagKV's ranks repeat in each of its three parts."""
    return 47 if press == "LagKVPress" else 48


def model(kind: str) -> Any:
    """A model whose weights are a hash of their place, and so the same in every environment."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config, cls = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    made = cls(config(**SIZES)).eval()
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            draw = noise.uniform(noise.mix(i, torch.arange(parameter.numel()))).float().view(parameter.shape)
            wide = 4 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1.0
            parameter.copy_((draw - 0.5) * wide + (parameter.dim() == 1))
    return made


def prompt() -> list[int]:
    """No token comes twice: the first layer's keys of equal tokens have equal norms."""
    return (noise.uniform(noise.mix(3, torch.arange(150))).argsort()[:TOKENS] + 3).tolist()


def recorded() -> Iterator[dict[str, Any]]:
    """What kvpress keeps of the prompt in every case: by layer and KV head, the positions."""
    import kvpress
    from transformers import DynamicCache

    from kvbench.integrations.kvpress.method import seed_of

    ids = torch.tensor([prompt()])
    for kind in KINDS:
        own = model(kind)
        whole = DynamicCache()
        own(ids, past_key_values=whole)
        for name, options in CASES.items():
            values = dict(options)
            if "press" in values:
                values["press"] = kvpress.SnapKVPress(window_size=8)
            press = getattr(kvpress, name)(**values)
            press.compression_ratio = 1 - budget_of(name) / TOKENS
            score = press.score

            def seeded(module: Any, *rest: Any, score: Any = score) -> torch.Tensor:
                torch.manual_seed(seed_of(NOISE_KEY, 0, module.layer_idx))
                return score(module, *rest)

            press.score = seeded
            cache = DynamicCache()
            with press(own):
                own(ids, past_key_values=cache)
            kept = [
                [places(now, before) for now, before in zip(layer.keys[0], full.keys[0])]
                for layer, full in zip(cache.layers, whole.layers)
            ]
            yield {"model": kind, "press": name, "options": options, "budget": budget_of(name), "kept": kept}


def places(kept: torch.Tensor, keys: torch.Tensor) -> list[int]:
    """The positions of kept keys [C, D] among all keys [N, D], sorted."""
    same = (kept[:, None] == keys[None]).all(dim=-1)
    assert bool((same.sum(dim=-1) == 1).all())
    return same.int().argmax(dim=-1).sort().values.tolist()


if __name__ == "__main__":
    versions = {name: importlib.metadata.version(name) for name in ("kvpress", "transformers", "torch")}
    with torch.no_grad():
        cases = ",\n".join(json.dumps(case) for case in recorded())
    print(f'{{"versions": {json.dumps(versions)}, "tokens": {TOKENS}, "cases": [\n{cases}\n]}}')
