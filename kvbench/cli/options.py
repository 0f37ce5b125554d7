"""The options of ``kvbench run``, declared once: flag, help text, panel.

Every number is text here on purpose; `kvbench.config.parsers` parses it. The message for a bad one is then the same
from a flag, a file or the environment.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer


def _option(*names: str, help: str, metavar: str = "N", panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, show_default=False, **more)


_WHAT, _HOW_MUCH, _DRAW = "What to run", "How much of it", "Sampling (default: each task's own)"
_PROMPT, _SCORING, _ENGINE, _RESULTS = "Prompts", "Scoring", "Engine", "Results"

Text = str | None
Texts = list[str] | None
Switch = bool | None

Method = Annotated[
    Texts,
    _option("--method", "-m", help="Methods; A+B: A on the prompt, B after. Repeatable.", metavar="NAME", panel=_WHAT),
]
Budget = Annotated[
    Texts,
    _option(
        "--budget",
        "-b",
        help="KV entries per layer and head after an eviction, or 25% of the prompt; repeatable.",
        panel=_WHAT,
    ),
]
TaskName = Annotated[
    Texts, _option("--task", "-t", help="Tasks, repeatable or with commas.", metavar="NAME", panel=_WHAT)
]
TaskFile = Annotated[
    Text,
    _option("--task-file", help="A task of your own: JSONL with question and answer.", metavar="FILE", panel=_WHAT),
]
MethodOpt = Annotated[
    Texts,
    _option("--method-opt", help="An option of a method; repeatable.", metavar="[METHOD.]NAME=VALUE", panel=_WHAT),
]
Plugin = Annotated[
    Texts,
    _option("--plugin", help="Python file with methods or tasks of your own; repeatable.", metavar="FILE", panel=_WHAT),
]
Model = Annotated[
    Text,
    _option("--model", help="Folder or hub name. Default: tiny, the built-in model.", metavar="MODEL", panel=_WHAT),
]
Revision = Annotated[Text, _option("--revision", help="Commit or tag of a hub model.", metavar="REV", panel=_WHAT)]
Suite = Annotated[Text, _option("--suite", help="demo, smoke, baselines or a TOML file.", metavar="NAME", panel=_WHAT)]
ConfigFile = Annotated[
    Text, _option("--config", help="Settings in a TOML file; flags win.", metavar="FILE", panel=_WHAT)
]

Limit = Annotated[Text, _option("--limit", help="Only the first N questions of each task.", panel=_HOW_MUCH)]
Samples = Annotated[
    Text, _option("--samples", help="Answers to each question. Default: the task's own.", panel=_HOW_MUCH)
]
MaxNewTokens = Annotated[
    Text, _option("--max-new-tokens", help="Longest answer in tokens. Default: the task's own.", panel=_HOW_MUCH)
]
Seed = Annotated[Text, _option("--seed", help="Seed of all random numbers. Default: 0.", panel=_HOW_MUCH)]

Temperature = Annotated[Text, _option("--temperature", help="0 is greedy.", metavar="X", panel=_DRAW)]
TopP = Annotated[
    Text, _option("--top-p", help="Nucleus: smallest set of tokens with this probability.", metavar="X", panel=_DRAW)
]
TopK = Annotated[Text, _option("--top-k", help="The K likeliest tokens; 0 is off.", metavar="K", panel=_DRAW)]
MinP = Annotated[Text, _option("--min-p", help="Tokens of at least X times the likeliest.", metavar="X", panel=_DRAW)]
Stop = Annotated[
    Texts,
    _option("--stop", help="Text that ends an answer, as the end token does; repeatable.", metavar="TEXT", panel=_DRAW),
]
Duplicates = Annotated[
    bool, _option("--allow-duplicate-samples", help="Several samples at temperature 0.", metavar="", panel=_DRAW)
]

PromptStyle = Annotated[
    Text,
    _option("--prompt-style", help="Wording of the question. Default: the task's own.", metavar="NAME", panel=_PROMPT),
]
Thinking = Annotated[
    Switch, _option("--thinking/--no-thinking", help="The chat template's thinking switch.", metavar="", panel=_PROMPT)
]
ChatTemplate = Annotated[
    Text, _option("--chat-template", help="Jinja file in place of the tokenizer's.", metavar="FILE", panel=_PROMPT)
]
NoChatTemplate = Annotated[Switch, _option("--no-chat-template", help="Plain text prompts.", metavar="", panel=_PROMPT)]
Data = Annotated[
    Text,
    _option("--data", help="Folder with task data. Default: KVBENCH_DATA, bundled, hub.", metavar="DIR", panel=_PROMPT),
]
DataRevision = Annotated[
    Text,
    _option(
        "--data-revision",
        help="Commit or branch of the hub's data sets, in place of the pinned one.",
        metavar="REV",
        panel=_PROMPT,
    ),
]
DataMismatch = Annotated[
    Switch,
    _option(
        "--allow-data-mismatch",
        help="Take data that are not the expected ones; the run's record says so.",
        metavar="",
        panel=_PROMPT,
    ),
]
MaxPromptTokens = Annotated[
    Text,
    _option(
        "--max-prompt-tokens",
        help="Longer texts lose their middle, in tasks that cut. Default: the model's context less the answer.",
        panel=_PROMPT,
    ),
]
MultiTurn = Annotated[
    Text,
    _option(
        "--multi-turn",
        help="keep: a later turn continues the evicted cache. reset: it is read as a new prompt. Default: keep.",
        metavar="HOW",
        panel=_PROMPT,
    ),
]

Judge = Annotated[
    Text,
    _option(
        "--judge",
        help="URL of an OpenAI-compatible endpoint, local:FOLDER, or none (store answers; 'kvbench score' later).",
        metavar="URL",
        panel=_SCORING,
    ),
]
JudgeModel = Annotated[Text, _option("--judge-model", help="The judge's name there.", metavar="NAME", panel=_SCORING)]
JudgeKeyEnv = Annotated[
    Text,
    _option(
        "--judge-key-env",
        help="Environment variable that holds the judge's key. Default: OPENAI_API_KEY.",
        metavar="NAME",
        panel=_SCORING,
    ),
]
JudgeMode = Annotated[
    Text,
    _option(
        "--judge-mode",
        help="single: rate each answer. pair: compare with the full cache's answer. Default: single.",
        metavar="MODE",
        panel=_SCORING,
    ),
]
JudgeKey = Annotated[Text, typer.Option("--judge-key", hidden=True)]
UnsafeRunCode = Annotated[
    Switch,
    _option(
        "--unsafe-run-code",
        help="Run model-written programs without a sandbox. Only on a machine that you can lose.",
        metavar="",
        panel=_SCORING,
    ),
]
KeepPrompts = Annotated[
    Switch, _option("--keep-prompts", help="Store the questions of gated data too.", metavar="", panel=_RESULTS)
]

Interval = Annotated[
    Text, _option("--interval", help="Generated tokens between evictions. Default: 128.", panel=_ENGINE)
]
Compress = Annotated[
    Text,
    _option(
        "--compress",
        help="query-aware: evict with the question read. query-agnostic: before it. Default: query-aware.",
        metavar="WHEN",
        panel=_ENGINE,
    ),
]
Prefill = Annotated[
    Text,
    _option(
        "--prefill",
        help="full: evict once the prompt is read. chunked: after every chunk, in bounded memory. Default: full.",
        metavar="HOW",
        panel=_ENGINE,
    ),
]
Device = Annotated[
    Text, _option("--device", help="auto, cpu, cuda, cuda:1. Default: auto.", metavar="DEVICE", panel=_ENGINE)
]
Dtype = Annotated[
    Text, _option("--dtype", help="auto, float32, bfloat16, float16. Default: auto.", metavar="DTYPE", panel=_ENGINE)
]
Attn = Annotated[
    Text,
    _option(
        "--attn", help="What reads prompts: sdpa, flash (flash-attn). Default: sdpa.", metavar="NAME", panel=_ENGINE
    ),
]
Slots = Annotated[
    Text, _option("--slots", help="Sequences decoded together. Default: auto (from free memory).", panel=_ENGINE)
]
BatchSize = Annotated[Text, _option("--batch-size", help="The same as --slots.", panel=_ENGINE)]
PrefillChunk = Annotated[
    Text, _option("--prefill-chunk", help="Prompt tokens read at once. Default: 512.", panel=_ENGINE)
]

Out = Annotated[str, _option("--out", help="Folder of all runs. Default: results.", metavar="DIR", panel=_RESULTS)]
RunName = Annotated[
    Text, _option("--run-name", help="Folder of this run; the same name continues it.", metavar="NAME", panel=_RESULTS)
]
Resume = Annotated[
    Text, _option("--resume", help="Continue a run with its own settings.", metavar="NAME", panel=_RESULTS)
]
DryRun = Annotated[bool, _option("--dry-run", help="Print the plan; generate nothing.", metavar="", panel=_RESULTS)]
VersionChange = Annotated[
    bool,
    _option(
        "--allow-version-change",
        help="Continue a run made with other versions, or with other code of its methods.",
        metavar="",
        panel=_RESULTS,
    ),
]
TakeOver = Annotated[
    bool, _option("--take-over", help="Take a run from a process on another host.", metavar="", panel=_RESULTS)
]
Json = Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON document.", metavar="")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no tables.", metavar="")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say where each setting came from.", metavar="")]
Plugins = Annotated[
    Texts,
    typer.Option(
        "--plugin",
        help="Python file with methods or tasks of your own; repeatable.",
        metavar="FILE",
        show_default=False,
    ),
]
