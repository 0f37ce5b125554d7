"""Presets of the built-in recipes: the settings of the papers, and settings for the built-in model.

(r) marks values that the released code or its model cards state, but not the paper. `Preset.about` names the settings
for which no source states a value. Such a setting has the value that `about` gives after "here", or else the recipe's
default. If a paper trains with Adam without weight decay, its preset uses AdamW with weight decay 0. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from kvbench.train.entry import Preset


def tiny(**values: Any) -> Preset:
    return Preset(about="for the built-in model, whose texts are short", values=values)


ADAM: dict[str, Any] = {"beta2": 0.999, "weight_decay": 0.0}
TORCH_ADAMW: dict[str, Any] = {"beta2": 0.999, "weight_decay": 0.01}  # (r) the defaults of torch.optim.AdamW

# LookaheadKV, arXiv 2603.10899: trains on 50,000 + 20,000 + 7,000 + 9,000 inputs; its tasks have thinking off.
LOOKAHEADKV = Preset(
    about="inputs up to 16K tokens, greedy answers up to 512, thinking off; the paper states no learning rate, batch "
    "(here 8) or steps (here 10,750, which draw each input once); the default rate was tuned on the "
    "built-in model of 0.9 M parameters: try smaller rates",
    values={"samples": 86_000, "steps": 10_750, "batch": 8, "thinking": False, "max_prompt": 16_384, "max_tokens": 512}
    | {"wrong": "keep", "rows": 32, "rank": 8, "alpha": 32.0},
)

# TRIM-KV, arXiv 2512.03324, and global retention, arXiv 2605.09649: released training scripts and model cards (r).
_GATES: dict[str, Any] = {"samples": 40_000, "steps": 10_000, "lr": 2e-4, "batch": 4, "warmup": 100}
_GATES |= {"weight_decay": 1e-6, "width": 512, "bias": 18.0, "wrong": "keep"}
_AT = (
    "given answers of OpenR1-Math-220k, {} tokens, budget {}, at most 10,000 steps; their number and the final rate "
    "are not stated"
)
_LONG = (
    "given texts of SynthLong, BookSum and Buddhi, 128K tokens, budget {}; number and final rate are not stated; a "
    "text of this length needs more memory than one GPU has (docs/training.md)"
)
TRIMKV = {
    "paper": Preset(about=_AT.format("16K", 512), values=_GATES | {"budget": 512, "max_tokens": 16_384}),
    "paper-128k": Preset(about=_LONG.format("4,096"), values=_GATES | {"budget": 4096, "max_tokens": 131_072}),
}
RETENTION = {
    "paper": Preset(about=_AT.format("32K", 128), values=_GATES | {"budget": 128, "max_tokens": 32_768}),
    "paper-16k": Preset(about=_AT.format("16K", 512), values=_GATES | {"budget": 512, "max_tokens": 16_384}),
    "paper-128k": Preset(about=_LONG.format("512"), values=_GATES | {"budget": 512, "max_tokens": 131_072}),
}

# ForesightKV, arXiv 2602.03203, appendix E.1: trains on right answers longer than 4,096 tokens.
_TRACES: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_tokens": 4097, "max_tokens": 16_384}
_TRACES |= {"prompt_style": "foresightkv", "unfinished": "drop"}
_ADAM_10: dict[str, Any] = ADAM | {"warmup": 10}
FORESIGHTKV = Preset(
    about="right answers longer than 4,096 tokens, sampled at temperature 0.6, top-p 0.95, top-k 20; the paper does "
    "not state how many (here of 8,000 questions) nor the longest (here 16,384 tokens); with the paper's margin of "
    "0.01 the method's draw becomes uniform (docs/training.md)",
    values=_TRACES
    | _ADAM_10
    | {"samples": 8000, "steps": 1000, "lr": 1e-2, "batch": 8, "floor": 0.0}  # floor (r)
    | {"budget": 1024, "interval": 256, "features": "paper6", "hidden": 16, "within": "mean", "margin": 0.01},
)
FORESIGHTKV_GRPO = Preset(
    about="answers as for foresightkv; budget 1024 and interval 256 up to 12,000 tokens, 2048 and 512 beyond",
    values=_TRACES
    | _ADAM_10
    | {"samples": FORESIGHTKV.values["samples"], "steps": 200, "lr": 3e-4, "batch": 32, "schedule": "constant"}
    | {"budget": 1024, "interval": 256, "long": 12_000, "long_budget": 2048, "long_interval": 512}
    | {"features": "paper6", "group": 8, "reward": "squared", "clip": 0.2, "kl": 0.01},
    models={
        "Qwen3-4B": {"kl": 0.01},
        "Qwen3-1.7B": {"kl": 0.03},
        "DeepSeek-R1-Distill-Qwen-7B": {"kl": 0.1},
    },
)

# G-KV, arXiv 2512.00504, section 7 and appendix C; optimiser, rates and schedules from the released scripts (r).
_GKV: dict[str, Any] = TORCH_ADAMW | {"lr": 1e-6, "prompt_style": "gkv"}
_GKV |= {"method": "gkv", "budget": 2048, "interval": 128, "precision": "bfloat16"}
GKV_DISTILL = Preset(
    about="answers sampled at temperature 0.6, right ones cut at 4,096 tokens; the paper does not state the longest "
    "answer (here 16,384 tokens)",
    values=_GKV
    | {"samples": 40_000, "steps": 250, "batch": 128, "floor": 0.0, "warmup": 12, "kl_temperature": 0.6}
    | {"temperature": 0.6, "max_tokens": 16_384, "truncate": 4096, "unfinished": "drop"},
)
GKV_RL = Preset(
    about="8 answers of at most 4,096 tokens to each of 16 questions per step, sampled at temperature 0.6 without "
    "top-p; the released script has temperature 0.8 and top-p 0.95",
    values=_GKV
    | {"samples": 40_000, "steps": 400, "batch": 16, "schedule": "constant", "warmup": 20}
    | {"group": 8, "temperature": 0.6, "max_tokens": 4096},
)

# KVzap, arXiv 2601.07891: 500 texts of each of nine kinds, 15 epochs; all values from the released script (r).
KVZAP = Preset(
    about="texts of 750 to 1,250 tokens as given, 15 times each; the release draws batches of 512 tokens of all texts, "
    "here a batch is 8 whole texts",
    values=TORCH_ADAMW
    | {"samples": 4500, "steps": 8438, "lr": 5e-3, "batch": 8, "warmup": 0, "floor": 0.0, "wrong": "keep"}
    | {"width": 512, "tokens": 1250, "target": "kvzip+", "max_tokens": 1250},
)

# Locret, arXiv 2410.01805: 3,000 texts of LongAlpaca, one per step; all values from the released script (r).
LOCRET = Preset(
    about="given answers to prompts of up to 10,240 tokens, one a step, 3,000 steps; the release lets the rate fall "
    "linearly, here by a cosine, and clips single gradients at 0.5",
    values=TORCH_ADAMW
    | {"samples": 3000, "steps": 3000, "lr": 5e-4, "batch": 1, "warmup": 2000, "floor": 0.0, "beta2": 0.95}
    | {"width": 1024, "tokens": 10_240, "smooth": 0.0025, "wrong": "keep"},
)

# DuoAttention, arXiv 2410.10819; rate, texts and schedule from the released script (r).
DUO = Preset(
    about="texts of 1,000 to 32,000 tokens; the paper hides 10 passkeys in BookSum's texts, kvbench in other sentences",
    values=TORCH_ADAMW
    | {"steps": 2000, "lr": 0.02, "batch": 8, "schedule": "trapezoid", "warmup": 400, "weight_decay": 0.0}
    | {"sinks": 128, "recent": 256, "reg": 0.05, "tokens": 32_000},
)
