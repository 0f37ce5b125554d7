"""``kvbench train METHOD --dry-run``: prints the plan of a training, its tokens, and the memory on each device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvbench.config.parsers import BadValue, parse, whole
from kvbench.console import terminal
from kvbench.console.progress import preparing
from kvbench.errors import UserError, quote
from kvbench.train.catalogue import entry_of
from kvbench.train.entry import COUNTS, Entry

if TYPE_CHECKING:
    from kvbench.train.memory import Phase
    from kvbench.train.plan import TrainingPlan

GB = 10**9
LARGEST = 1e9  # GB; no machine has so much
UNITS = {"GB": GB, "GiB": 2**30}
LIMIT = "Counted by running the recipe's code without weights. Scratch inside operators and the allocator add to it."


def gpu_memory(raw: object) -> int:
    """Parse the memory of a GPU, such as 80GB or 79.6GiB, into bytes. Raises BadValue."""
    found = re.fullmatch(r"(\d+\.?\d*) ?(GB|GiB)", str(raw).strip(), re.ASCII)
    if found is None or not 0 < float(found[1]) < LARGEST:
        raise BadValue("a size above 0 with its unit, like 80GB or 79.6GiB", quote(raw))
    return int(float(found[1]) * UNITS[found[2]])


def print_plan(kind: str, settings: Mapping[str, Any], typed: Mapping[str, Any]) -> None:
    """Print the plan of a training by the recipe `kind`. typed: the values of the command's options, by name. Raises
    UserError if --gpu-memory or --processes is invalid."""
    memory, processes, quiet = typed["gpu_memory"], typed["processes"], typed["quiet"]
    total = None if memory is None else parse("--gpu-memory", gpu_memory, memory)
    count = 1 if processes is None else parse("--processes", whole(1), processes)
    with preparing("counting the memory of the training", quiet=quiet):
        from kvbench.train.plan import Device, TrainingPlan

        plan = TrainingPlan.make(kind, typed["model"], settings, Device.of(typed["device"], total, count))
        changes, smaller = plan.smaller()
    if not quiet:
        _print(plan, typed["data"])
        _print_fit(plan, changes, smaller)
    if typed["json"]:
        terminal.data(_document(plan) | {"fits_with": changes if smaller.fits else None})


def refuse_without_plan(memory: str | None, processes: str | None) -> None:
    """Check the options of a command without --dry-run: raise UserError for --gpu-memory and --processes, which only a
    plan uses."""
    if memory is not None:
        raise UserError(
            "--gpu-memory only changes the plan of --dry-run. Give --dry-run too, or leave out --gpu-memory."
        )
    if processes is not None:
        raise UserError(
            "--processes only changes the plan of --dry-run. To train with several processes, start them with "
            "torchrun (docs/training.md)."
        )


def _print(plan: TrainingPlan, data: str | None) -> None:
    settings, entry = plan.settings, entry_of(plan.name)
    share = settings["batch"] // plan.device.processes
    own = {name: value for name, value in settings.items() if name in entry.options}
    prompt = f"prompt {plan.prompt:,}" + ("" if plan.known else " (assumed; --opt max_prompt=N limits prompts)")
    within = f"; assumed: each text fits into a sliding window, {plan.window:,} tokens" if plan.window else ""
    tokens = plan.tokens
    items = {"answers": "questions or texts", "questions": "questions", "examples": "examples"}[entry.learns_from]
    facts = {
        "data": data or (f"problems of {', '.join(entry.tasks)}" if entry.tasks else "its own texts"),
        "collect": f"{settings['samples']:,} {items}, and {entry.held_out} held out",
        "steps": f"{settings['steps']:,}, batch {settings['batch']} ({share} per process)",
        "settings": ", ".join(f"{name}={value}" for name, value in own.items()),
        "longest": f"{prompt}, answer {plan.answer:,} tokens{within}",
        "tokens": f"at most {tokens['step']:,} in the texts of a step, {tokens['all_steps']:,} in all steps",
        "generates": _generated(tokens, entry, data),
        "device": _device(plan),
    }
    for name, text in facts.items():
        print(f"{name:<9} {terminal.clean(text)}")
    rows = [(phase.name, _gb(phase.bytes), phase.note) for phase in plan.phases]
    terminal.table(("phase", "GB", ""), rows, right=("GB",))
    terminal.table((f"peak: {plan.peak.name}", "GB"), _parts(plan.peak), right=("GB",))
    if plan.uncounted:
        terminal.warning(f"the memory of the recipe's steps could not be counted: {plan.uncounted}")
    print(LIMIT)


def _generated(tokens: Mapping[str, int], entry: Entry, data: str | None) -> str:
    """Return how many tokens the model generates for the training. data: the place of the user's data, if any."""
    parts = []
    if before := tokens["generated_before"]:
        parts.append(f"at most {before:,} tokens before the first step")
        parts += ["none where --data has answers"] if data else []
    if steps := tokens["generated_in_steps"]:
        parts.append(f"at most {steps:,} tokens in all steps")
    if "questions" in (entry.learns_from, entry.tested_on):
        parts.append("answers for held-out figures not counted")
    return "; ".join(parts) or "no answers"


def _device(plan: TrainingPlan) -> str:
    device, dtype = plan.device, str(plan.dtype).removeprefix("torch.")
    what = "GPU" if device.gpu else "CPU"
    several = f"{device.processes} processes, each with a {what}" if device.processes > 1 else f"a {what}"
    return f"{several} of {_gb(device.total)} GB; weights in {dtype}"


def _print_fit(plan: TrainingPlan, changes: Mapping[str, Any], smaller: TrainingPlan) -> None:
    peak, total = f"{_gb(plan.peak.bytes)} GB per process", f"{_gb(plan.device.total)} GB"
    if plan.fits:
        print(f"{peak}: fits into {total}.")
        return
    if plan.fits is None:
        counted = f" The other phases take up to {peak}." if plan.phases else ""
        print(f"Unknown whether it fits into {total}: the memory of its steps is not counted.{counted}")
        return
    options = " ".join(f"--opt {name}={value}" for name, value in changes.items())
    if smaller.fits:
        print(f"{peak}: does not fit into {total}; {_gb(smaller.peak.bytes)} GB with {options}.")
    else:
        least = f" ({_gb(smaller.peak.bytes)} GB with {options})" if changes else ""
        print(f"{peak}: does not fit into {total}{least}. Use shorter texts or a larger GPU.")


def _parts(phase: Phase) -> list[tuple[str, str]]:
    """Return the name and the GB of each part of a phase's memory, the largest first; parts below 5 MB are added up as
    "others"."""
    shown = {name: size for name, size in phase.parts.most_common() if size >= 0.005 * GB}
    rest = phase.bytes - sum(shown.values())
    return [(name, _gb(size)) for name, size in shown.items()] + ([("others", _gb(rest))] if rest > 0 else [])


def _gb(size: float) -> str:
    return f"{size / GB:,.2f}"


def _document(plan: TrainingPlan) -> dict[str, Any]:
    return {
        "recipe": plan.name,
        "processes": plan.device.processes,
        "memory": plan.device.total,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "prompt": plan.prompt,
        "answer": plan.answer,
        "tokens": plan.tokens,
        "settings": {name: plan.settings[name] for name in (*COUNTS, *entry_of(plan.name).options)},
        "phases": [
            {"phase": phase.name, "bytes": phase.bytes, "parts": dict(+phase.parts), "note": phase.note}
            for phase in plan.phases
        ],
        "peak": plan.peak.name,
        "peak_bytes": plan.peak.bytes,
        "fits": plan.fits,
        "not_counted": plan.uncounted,
    }
