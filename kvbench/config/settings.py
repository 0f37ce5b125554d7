"""The settings of a run, each declared once, in the order of ``kvbench run --help``.

To add a setting, add a field to `Settings` with its default, parser and help text. kvbench generates all else from the
field: the flag, the key in config files, the environment variable, the entry in run.json and the key in lm-eval's
model_args.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kvbench.config.parsers import (
    BadValue,
    Parser,
    assignments,
    choice,
    files,
    flag,
    got,
    number,
    setting,
    strings,
    text,
    whole,
)
from kvbench.eviction.options import as_whole

DTYPES = ("auto", "float32", "bfloat16", "float16")
MOST = 1_000_000  # questions per task, samples per question

# The panels of ``--help``, in its order.
what = partial(setting, panel="What to run")
how_much = partial(setting, panel="How much to run")
sampling = partial(setting, panel="Sampling (default: each task's own)")
prompts = partial(setting, panel="Prompts")
scoring = partial(setting, panel="Scoring")
engine = partial(setting, panel="Engine")
results = partial(setting, panel="Results")


def count(raw: object) -> int:
    """Parse a number of questions or samples, from 1 to `MOST`."""
    if (value := as_whole(raw)) is not None and value > MOST:
        raise BadValue(f"{MOST:,} or less", got(raw))
    return int(whole(1)(raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run.

    None means that the user gave no value. If a sampling setting (temperature, top_p and so on) is None, the task's own
    value applies (`GenSpec`). "auto" means that the engine chooses the value. Only in `device_map`, "auto" means that
    the model is divided among GPUs.
    """

    task_file: str | None = what(
        None, text, "A task of your own: a JSONL file with questions and answers.", metavar="FILE"
    )
    plugin: tuple[str, ...] = what(
        (), files, "Python file with methods, tasks or recipes of your own; repeatable.", metavar="FILE"
    )
    model: str = what(
        "tiny", text, "Model: a folder or a hub name. Default: tiny, the built-in model.", metavar="MODEL"
    )
    revision: str | None = what(None, text, "Commit or tag of a hub model.", metavar="REV")
    adapter: str | None = what(
        None, text, "Folder of a LoRA adapter (saved by peft) to merge into the model.", metavar="DIR"
    )

    limit: int | None = how_much(None, count, "Only the first N questions of each task.")
    samples: int | None = how_much(None, count, "Answers to each question. Default: the task's own.")
    max_new_tokens: int | None = how_much(None, whole(1), "Most tokens of an answer. Default: the task's own.")
    seed: int = how_much(0, whole(0, 2**64 - 1), "Seed of all random numbers. Default: 0.")

    temperature: float | None = sampling(
        None, number("a finite number >= 0", lambda x: x >= 0), "Temperature of sampling; 0 is greedy.", metavar="X"
    )
    top_p: float | None = sampling(
        None,
        number("in (0, 1]", lambda x: 0 < x <= 1),
        "Draw from the smallest set of tokens with this total probability; 1 is off.",
        metavar="X",
    )
    top_k: int | None = sampling(None, whole(0), "Draw from the K most probable tokens; 0 is off.", metavar="K")
    min_p: float | None = sampling(
        None,
        number("in [0, 1)", lambda x: 0 <= x < 1),
        "Draw from tokens that have at least X times the largest probability; 0 is off.",
        metavar="X",
    )
    stop: tuple[str, ...] = sampling(
        (), strings, "Text that ends an answer, in addition to the end token; repeatable.", metavar="TEXT"
    )

    prompt_style: str | None = prompts(None, text, "Wording of the question. Default: the task's own.", metavar="NAME")
    thinking: bool | None = prompts(
        None, flag, "Turn the chat template's thinking on or off. Default: the template's own."
    )
    chat_template: str | None = prompts(
        None, text, "Jinja file in place of the tokenizer's chat template.", metavar="FILE"
    )
    template_option: tuple[str, ...] = prompts(
        (),
        assignments,
        "A variable of the chat template, such as reasoning_effort=high; repeatable.",
        metavar="NAME=VALUE",
    )
    no_chat_template: bool = prompts(False, flag, "Give prompts as plain text, without the chat template.")
    data: str | None = prompts(
        None, text, "Folder with task data. Default: KVBENCH_DATA, else bundled files, else the hub.", metavar="DIR"
    )
    data_revision: str | None = prompts(
        None, text, "Commit or branch of data sets on the hub, instead of the pinned commit.", metavar="REV"
    )
    allow_data_mismatch: bool = prompts(
        False, flag, "Accept data with other rows or ids than expected; the run's record states the difference."
    )
    max_prompt_tokens: int | None = prompts(
        None,
        whole(2),
        "Most tokens of a prompt in tasks that cut the middle of longer prompts; other tasks ignore this option. "
        "Default: the model's context less the answer.",
    )
    multi_turn: Literal["keep", "reset"] = prompts(
        "keep",
        choice("keep", "reset"),
        "keep: a later turn continues the evicted cache. reset: read all turns so far as a new prompt. Default: keep.",
        metavar="HOW",
    )

    judge: str | None = scoring(
        None,
        text,
        "URL of an OpenAI-compatible endpoint, local:FOLDER (folder of a judge model), or none ('kvbench score' can "
        "judge later).",
        metavar="URL",
    )
    judge_model: str | None = scoring(None, text, "Name of the judge model at the endpoint.", metavar="NAME")
    judge_key_env: str = scoring(
        "OPENAI_API_KEY",
        text,
        "Environment variable that holds the judge's key. Default: OPENAI_API_KEY.",
        metavar="NAME",
    )
    judge_mode: Literal["single", "pair"] = scoring(
        "single",
        choice("single", "pair"),
        "single: rate each answer. pair: compare with the full cache's answer. Default: single.",
        metavar="MODE",
    )
    unsafe_run_code: bool = scoring(
        False, flag, "Run model-written programs without a sandbox. Only on a machine that you can lose."
    )

    interval: int = engine(128, whole(1), "Generated tokens between evictions; several with commas. Default: 128.")
    compress: Literal["query-aware", "query-agnostic"] = engine(
        "query-aware",
        choice("query-aware", "query-agnostic"),
        "query-aware: evict the prompt after reading its question. query-agnostic: before it. Default: query-aware.",
        metavar="WHEN",
    )
    prefill: Literal["full", "chunked"] = engine(
        "full",
        choice("full", "chunked"),
        "full: evict after reading the prompt. chunked: after each chunk of it, in bounded memory. Default: full.",
        metavar="HOW",
    )
    device: str = engine("auto", text, "Device: auto, cpu, cuda, cuda:1. Default: auto.", metavar="DEVICE")
    # The next settings are not in OPERATIONAL, although they change only how the engine computes: with another number
    # of slots, or without compilation, the last bits of logits may differ.
    device_map: Literal["none", "auto"] = engine(
        "none",
        choice("none", "auto"),
        "auto: divide the layers of a model that is larger than one GPU among all visible GPUs. Default: none.",
        metavar="HOW",
    )
    dtype: str = engine(
        "auto",
        choice(*DTYPES),
        "Number type of weights and cache: auto, float32, bfloat16, float16. Default: auto.",
        metavar="DTYPE",
    )
    attn: Literal["sdpa", "flash"] = engine(
        "sdpa",
        choice("sdpa", "flash"),
        "Attention code that reads prompts: sdpa, flash (flash-attn). Default: sdpa.",
        metavar="NAME",
    )
    decode_attn: Literal["triton", "torch", "varlen"] = engine(
        "triton",
        choice("triton", "torch", "varlen"),
        "Attention code that decodes on a GPU: triton, torch, varlen (torch 2.13). Default: triton.",
        metavar="NAME",
    )
    no_compile: bool = engine(False, flag, "Decode on a GPU without compiling the model's layers.")
    compile_cpu: bool | None = engine(
        None,
        flag,
        "Decode on a CPU with a compiled program: up to three times as fast, after 10 to 20 s of compiling per method "
        "and budget. Needs a C++ compiler.",
    )
    prefill_chunk: int = engine(
        512,
        whole(1),
        "Prompt tokens read at once. A GPU may read up to 4,096 if no eviction comes between them. Default: 512.",
    )
    slots: int | Literal["auto"] = engine(
        "auto", whole(1, word="auto"), "Sequences decoded together. Default: auto (from free memory)."
    )

    keep_prompts: bool = results(
        False, flag, "Also store questions whose data the hub shows only to readers who accept terms (gated)."
    )


SETTINGS = {f.name: f for f in dataclasses.fields(Settings)}
PARSERS: dict[str, Parser] = {name: f.metadata["parser"] for name, f in SETTINGS.items()}
DEFAULTS: dict[str, Any] = {name: [] if f.default == () else f.default for name, f in SETTINGS.items()}  # as in JSON
SCORING = (
    "judge",
    "judge_model",
    "judge_key_env",
    "judge_mode",
    "unsafe_run_code",
)  # rows state the judge and the sandbox
SOURCES = (
    "data",
    "data_revision",
    "allow_data_mismatch",
)  # where data come from; a continued run compares the data themselves
PER_TASK = ("limit", "prompt_style")  # settings that a [[grid]] block may give for its tasks
OPERATIONAL = (*SOURCES, "plugin", "keep_prompts", *SCORING)  # may differ when a run is continued
