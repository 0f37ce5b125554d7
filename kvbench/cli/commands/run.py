"""``kvbench run``: its options. `kvbench.cli.start` gathers, checks and starts; help needs none of that."""

from __future__ import annotations

from pathlib import Path

import typer

from kvbench.cli import options
from kvbench.console import signals, terminal

EPILOG = """Examples:
  kvbench run --method gkv --budget 64 --interval 32 --task walk
  kvbench run --method full,gkv,h2o --budget 48,25% --interval 32 --task walk,lookup --limit 32 --run-name first
  kvbench run --suite demo
  kvbench run --model Qwen/Qwen3-4B --method rkv --budget 1024 --task aime24 --dry-run
  kvbench run --resume first
"""


def run(
    context: typer.Context,
    method: options.Method = None,
    budget: options.Budget = None,
    task: options.TaskName = None,
    task_file: options.TaskFile = None,
    method_opt: options.MethodOpt = None,
    plugin: options.Plugin = None,
    model: options.Model = None,
    revision: options.Revision = None,
    suite: options.Suite = None,
    config: options.ConfigFile = None,
    limit: options.Limit = None,
    samples: options.Samples = None,
    max_new_tokens: options.MaxNewTokens = None,
    seed: options.Seed = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    stop: options.Stop = None,
    allow_duplicate_samples: options.Duplicates = False,
    prompt_style: options.PromptStyle = None,
    thinking: options.Thinking = None,
    chat_template: options.ChatTemplate = None,
    no_chat_template: options.NoChatTemplate = None,
    data: options.Data = None,
    data_revision: options.DataRevision = None,
    allow_data_mismatch: options.DataMismatch = None,
    max_prompt_tokens: options.MaxPromptTokens = None,
    multi_turn: options.MultiTurn = None,
    judge: options.Judge = None,
    judge_model: options.JudgeModel = None,
    judge_key_env: options.JudgeKeyEnv = None,
    judge_mode: options.JudgeMode = None,
    judge_key: options.JudgeKey = None,
    unsafe_run_code: options.UnsafeRunCode = None,
    interval: options.Interval = None,
    compress: options.Compress = None,
    prefill: options.Prefill = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    attn: options.Attn = None,
    slots: options.Slots = None,
    batch_size: options.BatchSize = None,
    prefill_chunk: options.PrefillChunk = None,
    out: options.Out = "results",
    run_name: options.RunName = None,
    resume: options.Resume = None,
    dry_run: options.DryRun = False,
    keep_prompts: options.KeepPrompts = None,
    allow_version_change: options.VersionChange = False,
    take_over: options.TakeOver = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Run methods at budgets on tasks: every method at every budget on every task, on the same questions."""
    from kvbench.cli.start import start

    start(context.params)


def report_on(run_dir: Path, *, quiet: bool) -> None:
    """Print the tables of a run and write them into its folder."""
    from kvbench.report.load import load
    from kvbench.report.render import text, write
    from kvbench.report.scores import ScoreReport

    with signals.phase(lambda: f"interrupted: all rows are saved; 'kvbench report {run_dir}' makes the tables."):
        report = ScoreReport.make(load([run_dir]))
        paths = write(report, run_dir / "report")
    if not quiet:
        print(text(report))
        terminal.note(f"rows are in {run_dir}, this report in {paths[0]}.")
