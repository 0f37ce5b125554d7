"""``kvbench compare BASE NEW``: tests whether the run NEW is worse than the run BASE.

A regression run in continuous integration ends with this command. It imports torch only with ``--replay``.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.options import Text, Texts, plain, takes
from kvbench.config.parsers import choice, parse
from kvbench.config.plugins import load_plugins
from kvbench.console import terminal
from kvbench.errors import SetupError, UserError, quote

if TYPE_CHECKING:
    from kvbench.compare.cell import Side
    from kvbench.compare.outcome import Outcome
    from kvbench.compare.policy import Policy

EPILOG = """Exit code: 0 pass; 5 a regression; 4 cells or scores missing; 2 not comparable. Undecided cells pass with a
warning, and fail with --strict (before the second of two stages, only if the first finds a drop).

Examples:
  kvbench compare main today
  kvbench compare main --save results/baselines/ci.json
  kvbench compare results/baselines/ci.json today --gate gate.toml --format github
  kvbench compare main today --margin 0.02 --strict
  kvbench compare main,main-1 today,today-1 --two-stage
  kvbench compare main today --map gkv=mine --flips
  kvbench compare main --plan --margin 0.02
  kvbench compare main --save main.json --replay && kvbench compare main.json today --replay

--replay loads the model, lets every method read the first answers of the full cache again, and prints where BASE and
NEW first keep different entries. A run does not store these decisions; the installed code makes them now. To compare
with an older version of the code, save its decisions with --save and --replay while that version is installed.
"""
AGAIN = ("plugin", "task", "task_file", "chat_template", "model", "data", "device")  # a run's folder may not set these
FORMATS = ("text", "json", "markdown", "junit", "github")


@takes(*AGAIN)
def compare(
    typed: Mapping[str, Any],
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="Run folders, separated by commas, or a baseline file from --save.")
    ],
    new: Annotated[
        Text, typer.Argument(metavar="[NEW]", help="Folders of runs to compare with BASE.", show_default=False)
    ] = None,
    margin: Annotated[Text, plain("--margin", "Accept a score that is lower by up to M, as in 0.02.", "M")] = None,
    gate: Annotated[
        Text,
        plain("--gate", "TOML file with the margin and tier (critical, advisory) of cells, and with limits.", "FILE"),
    ] = None,
    strict: Annotated[
        bool, plain("--strict", "Also fail if cells are undecided (exit code 5) or a run of NEW is unfinished (4).")
    ] = False,
    two_stage: Annotated[
        bool, plain("--two-stage", "Report a drop only if the test on a second seed finds it too.")
    ] = False,
    map_: Annotated[
        Texts, plain("--map", "Compare BASE's method or model with another one of NEW.", "BASE=NEW")
    ] = None,
    format: Annotated[str, typer.Option("--format", metavar="FORMAT", help=f"{', '.join(FORMATS)}.")] = "text",
    flips: Annotated[bool, plain("--flips", "Show the questions whose scores changed.")] = False,
    plan: Annotated[bool, plain("--plan", "Print how many questions the margin needs; takes BASE alone.")] = False,
    save: Annotated[Text, plain("--save", "Save BASE as a baseline file; takes BASE alone.", "FILE")] = None,
    replay: Annotated[
        bool,
        plain("--replay", "Let the methods of both sides read answers again, and compare which entries they keep."),
    ] = False,
    json: Annotated[bool, plain("--json", "The same as --format json.")] = False,
) -> int:
    """Test whether NEW is worse than BASE: by equality where answers must be equal, otherwise by paired tests."""
    parse("--format", choice(*FORMATS), format)
    format = "json" if json else format
    from kvbench.compare.reading import read_side, read_sides

    alone = "--save" if save is not None else "--plan" if plan else ""
    others: dict[str, object] = {"--map": map_, "--flips": flips, "--two-stage": two_stage, "--strict": strict}
    if not plan:
        others |= {"--margin": margin, "--gate": gate}
    _check(typed, alone, new, [flag for flag, given in others.items() if given], format, replay=replay)
    load_plugins(typed["plugin"] or [])  # those that a run's folder names are never imported
    policy = _policy(margin, gate, strict)
    if alone:
        old = read_side(base)
        return _alone(_decided(old, typed) if replay else old, save, plan, policy, as_json=format == "json")
    from kvbench.compare.matching import parse_map
    from kvbench.compare.outcome import compare as judge

    assert new is not None
    mapping, (old, now) = parse_map(map_ or []), read_sides(base, new)
    if replay:
        old, now = _both_decided(old, now, mapping, typed)
    outcome = judge(old, now, policy, mapping, stages=2 if two_stage else 1)
    _say(outcome, quiet=format == "github")
    drawn = _drawn(outcome, format, flips)
    print(_plain(drawn) if format in ("text", "markdown") else drawn)
    return outcome.exit_code


def _check(
    typed: Mapping[str, Any], alone: str, new: str | None, others: Sequence[str], format: str, *, replay: bool
) -> None:
    """Raise UserError for options that cannot be given together, and if NEW is missing.

    alone: the given option that takes BASE without NEW (--save, --plan); "" if there is none. others: the given options
    that have no effect with `alone`.
    """
    if alone and new is not None:
        raise UserError(f"{alone} takes BASE alone; leave out {quote(new)}.")
    if alone and format not in ("text", "json"):
        raise UserError(
            f"--format {quote(format)} needs a comparison, but {alone} compares nothing. Choose text or json."
        )
    if alone and others:
        raise UserError(f"{alone} takes BASE alone; leave out {others[0]}.")
    if not alone and new is None:
        raise UserError("give a second run: kvbench compare BASE NEW. --save and --plan take BASE alone.")
    if "--flips" in others and format == "junit":
        raise UserError("--format 'junit' does not show --flips. Choose text, json, markdown or github.")
    given = [name for name in AGAIN if name != "plugin" and typed[name]]
    if given and not replay:
        flag = f"--{given[0].replace('_', '-')}"
        raise UserError(f"{flag} belongs to --replay; add --replay or leave out {flag}.")


def _policy(margin: str | None, gate: str | None, strict: bool) -> Policy:
    from kvbench.compare import policy

    found = policy.read_policy(Path(gate)) if gate is not None else policy.Policy()
    if margin is not None:
        found = dataclasses.replace(found, margin=policy.margin(margin, "--margin"))
    return dataclasses.replace(found, strict=found.strict or strict)


def _both_decided(old: Side, now: Side, mapping: Mapping[str, str], typed: Mapping[str, Any]) -> tuple[Side, Side]:
    """Return both sides with their decisions: the entries that the methods keep. The decisions of NEW are recorded now.
    The decisions of BASE are also recorded now, unless BASE is a baseline file that holds decisions.

    Raises UserError for runs that cannot be compared. This is checked before a model is loaded.
    """
    from kvbench.compare.decisions import one_run
    from kvbench.compare.matching import match

    match(old, now, mapping)
    recorded = any(cell.decisions for cell in old.cells.values())
    for side in (now,) if recorded else (old, now):
        one_run(side)
    return old if recorded else _decided(old, typed), _decided(now, typed)


def _decided(side: Side, typed: Mapping[str, Any]) -> Side:
    """Return the run with its decisions: the entries that the methods keep. The installed code makes them now, while
    the model reads the run's answers again.

    A run's folder may come from anyone. kvbench therefore asks the hub only for names that the user gave.
    """
    from kvbench.cli.continued import TO_ASK, asked, continued
    from kvbench.cli.replayed_run import inputs_of
    from kvbench.compare.decisions import decided, one_run
    from kvbench.config.layers import gather
    from kvbench.replay.work import check_evictions
    from kvbench.sources import hub

    one_run(side)
    [folder] = side.folders
    given = gather(typed, os.environ)
    config = continued(folder.parent, folder.name, given, needed=TO_ASK, more_plugins=True)
    check_evictions(config, folder.name)
    with hub.only(asked(config, given)):
        return decided(side, config, inputs_of(config, folder))


def _alone(side: Side, save: str | None, plan: bool, policy: Policy, *, as_json: bool) -> int:
    """Carry out --plan and --save, which take BASE alone, and return the exit code.

    --plan prints how many questions a margin needs; --save writes BASE to a baseline file.
    """
    from kvbench.compare import baseline, planning, words

    for run in side.unfinished.items():
        terminal.warning(words.unfinished(*run))
    if plan:
        found = list(planning.plans(side, policy))
        if not found and any(policy.margin_of(key) > 0 for key in side.cells):
            raise UserError(f"--plan needs scores, but {quote(side.name)} has none. Run 'kvbench score RUN'.")
        if not found:
            raise UserError("--plan needs a margin above 0, as in --margin 0.02.")
        if as_json:
            terminal.data({"plans": [dataclasses.asdict(one) for one in found]})
        else:
            print(planning.text(found))
    if save is not None:
        path = Path(save)
        if path.suffix != ".json":
            raise UserError(f"--save {quote(save)}: give a file name that ends with .json.")
        baseline.write(path, side)
        print(f"wrote {path} ({len(side.cells)} cells, {path.stat().st_size:,} bytes)", file=sys.stderr)
    return 0


def _say(outcome: Outcome, *, quiet: bool) -> None:
    """Print notices, warnings and failures on stderr.

    quiet: leave out undecided cells and failures, because they are printed on stdout as GitHub annotations.
    """
    from kvbench.compare import words

    for side in (outcome.base, outcome.new):
        for notice in side.notices:
            terminal.warning(_plain(notice))
        for run in side.unfinished.items():
            if side is outcome.base or not outcome.wanting:  # else it is a failure below
                terminal.warning(_plain(words.unfinished(*run)))
    for line in (*words.unused(outcome), *words.one_stage(outcome)):
        terminal.warning(_plain(line))
    for kind, what in words.differing(outcome):
        if kind == "surroundings":
            terminal.warning(_plain(f"{what}; the last bits of logits may differ too."))
    if quiet:
        return
    for line in words.undecided(outcome):
        terminal.warning(_plain(line))
    for critical, why in words.failures(outcome):
        print(_plain(f"{'fail' if critical else 'warning'}: {terminal.clean(why)}"), file=sys.stderr)


def _plain(text: str) -> str:
    from kvbench.compare.github import without_commands

    return without_commands(text) if os.environ.get("GITHUB_ACTIONS") else text


def _drawn(outcome: Outcome, format: str, flips: bool) -> str:
    from kvbench.compare import flips as changed
    from kvbench.compare.github import commands
    from kvbench.compare.junit import junit
    from kvbench.compare.tables import Comparison
    from kvbench.report.render import FORMATS as DRAWN

    tables = Comparison.make(outcome, flips=flips)
    if format == "junit":
        return junit(outcome)
    if format in ("json", "text"):
        return DRAWN[format](tables) + (f"\n\n{changed.text(outcome)}" if flips and format == "text" else "")
    markdown = DRAWN["markdown"](tables) + (f"\n\n{changed.markdown(outcome)}" if flips else "")
    return markdown if format == "markdown" else "\n".join([*commands(outcome), _summary(markdown)])


def _summary(markdown: str) -> str:
    """Append Markdown to the file from which GitHub makes a job's summary page, and return "".

    If GITHUB_STEP_SUMMARY is not set, return the Markdown, to be printed. Raises SetupError if the file cannot be
    written.
    """
    from kvbench.compare.github import fenced

    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return fenced(markdown)
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(markdown + "\n")
    except OSError as error:
        raise SetupError(
            f"cannot write {quote(path)}, which GITHUB_STEP_SUMMARY names ({error.strerror}). Name another file, or "
            "unset the variable."
        ) from error
    return ""
