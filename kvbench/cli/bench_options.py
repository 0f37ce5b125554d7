"""Parses the options of `kvbench bench`. A typed option overrides the preset's value, which overrides the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.cli.checks import refuse_oracle
from kvbench.cli.request import chosen
from kvbench.config.parsers import BadValue, Parser, choice, number, parse, split, whole
from kvbench.config.run_config import MethodChoice
from kvbench.config.settings import DEFAULTS as RUN_DEFAULTS
from kvbench.config.settings import DTYPES, PARSERS
from kvbench.console.problems import Problems
from kvbench.errors import UserError
from kvbench.eviction import choose
from kvbench.eviction.budget import Budget
from kvbench.eviction.options import check_budget
from kvbench.runner.bench.presets import PRESETS, Preset
from kvbench.runner.bench.shapes import BASELINES, LONGEST, SHAPES

Pair = tuple[MethodChoice, Budget | None]  # a method at a budget
DEFAULTS = {
    "baseline": "transformers",
    "sequences": "1,8,32",
    "samples": "1",
    "prompt": "64",
    "new-tokens": "1024",
    "interval": "32",
    "shape": "A",
    "device": "auto",
    "dtype": "auto",
    "decode-attn": RUN_DEFAULTS["decode_attn"],
    "threads": "1",
    "repeats": "5",
}


def _list(name: str, member: Parser, example: str) -> Parser:
    """Return the parser of option `name`, whose value is a comma-separated list. member: the parser of each member.
    example: a valid list, which the error for an empty list shows."""

    def parser(raw: object) -> tuple[Any, ...]:
        members = split(f"--{name}", raw, f"Example: --{name} {example}.")
        return tuple(dict.fromkeys(parse(f"--{name}", member, each) for each in members))

    return parser


_gib = number("a positive number of GiB", lambda value: value > 0)


def _baselines(raw: object) -> tuple[str, ...]:
    names = _list("baseline", choice(*BASELINES, "none"), "transformers,continuous")(raw)
    if "none" in names and len(names) > 1:
        raise BadValue(predicate=f"{raw}: 'none' cannot be combined with other names; give it alone.")
    return tuple(name for name in names if name != "none")


def _sequences(raw: object) -> tuple[int | None, ...]:
    numbers = _list("sequences", whole(1, word="max"), "1,8")(raw)
    return tuple(None if n == "max" else n for n in numbers)


_PARSERS: dict[str, Parser] = {
    "baseline": _baselines,
    "sequences": _sequences,
    "samples": whole(1),
    "prompt": _list("prompt", whole(1), "4096,8192"),
    "new-tokens": _list("new-tokens", whole(1), "1024,2048"),
    "stretch": whole(1),
    "interval": whole(1),
    "shape": choice(*SHAPES),
    "device": str,
    "dtype": choice(*DTYPES),
    "decode-attn": PARSERS["decode_attn"],
    "compile-cpu": PARSERS["compile_cpu"],
    "threads": whole(1),
    "repeats": whole(1),
    "memory": lambda raw: int(_gib(raw) * 2**30),
}
DEFAULT_SYSTEMS = (("tova", "", (128,)),)  # (label, name in the paper, budgets), as in `Preset.systems`
_FIELDS = {"baseline": "baselines", "prompt": "prompts"}  # option -> its field of `Setting`, if named otherwise
_SCALED = ("prompts", "new_tokens", "interval")  # numbers of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The checked options of one call of `kvbench bench`.

    Attributes:
        pairs: each method at each of its budgets. values: the values of other fields of `Setting`, by name; fields that
        are absent keep their defaults. scale: the paper's numbers of tokens are `scale` times those of this call.
    """

    pairs: tuple[Pair, ...]
    values: dict[str, Any]
    preset: Preset | None
    scale: int


def read(typed: Mapping[str, Any]) -> Asked:
    """Parse and check all options. typed: the values that the user typed, by option name; None: not typed. Raises
    UserError. One error lists all problems, except those of --preset, --scale and the numbers of tokens."""
    problems = Problems()
    preset, scale = _preset(typed["preset"]), _scale(typed["scale"], typed["preset"])
    texts: dict[str, Any] = DEFAULTS | (dict(preset.options) if preset else {})
    values: dict[str, Any] = {}
    for name, parser in _PARSERS.items():
        given = typed[name.replace("-", "_")]
        text = texts.get(name) if given is None else given
        if text is None:
            continue
        with problems.collect():
            field = _FIELDS.get(name, name.replace("-", "_"))
            values[field] = parse(f"--{name}", parser, text)
            if given is None and preset and name in preset.options and field in _SCALED:
                values[field] = _scaled(values[field], scale)
    if preset and typed["shape"] is None:
        values["shape"] = next(iter(preset.shapes))
    pairs = _pairs(typed, preset, scale, problems)
    for method, budget in pairs:
        with problems.collect():
            _check(method, budget)
    problems.stop()
    _check_lengths(values)
    return Asked(pairs=pairs, values=values, preset=preset, scale=scale)


def _preset(name: str | None) -> Preset | None:
    return None if name is None else PRESETS[parse("--preset", choice(*PRESETS), name)]


def _scale(text: str | None, preset: str | None) -> int:
    if text is not None and preset is None:
        raise UserError("--scale divides the numbers of tokens of a preset. Give a --preset too, or leave out --scale.")
    return int(parse("--scale", whole(1), text or "1"))


def _scaled(tokens: Any, scale: int) -> Any:
    """Return a number of tokens divided by `scale`, rounded down, at least 1. For a tuple of numbers return a tuple
    of these results, each once."""
    if isinstance(tokens, tuple):
        return tuple(dict.fromkeys(max(1, n // scale) for n in tokens))
    return max(1, tokens // scale)


def _pairs(typed: Mapping[str, Any], preset: Preset | None, scale: int, problems: Problems) -> tuple[Pair, ...]:
    """Return (method, budget) for each method at each of its budgets. The budget is None for a method that takes none.

    The methods are those that the user typed or, if none was typed, the `systems`: those of the preset or, without a
    preset, `DEFAULT_SYSTEMS`. A typed method option is added to the options that a system has already. If the user
    typed a method, a method option or a budget, all methods have the same budgets: the typed budgets or, if none was
    typed, the budgets of all `systems`. Otherwise each method has its own budgets from `systems`.
    """
    systems = preset.systems if preset else DEFAULT_SYSTEMS
    own = {label: _scaled(budgets, scale) for label, _, budgets in systems}
    axes = {name: typed[name] for name in ("method", "budget", "method_opt")}
    chooses = bool(axes["method"] or axes["method_opt"])
    axes["method"] = axes["method"] or [{"name": _name(label), **dict(_options(label))} for label in own]
    axes["budget"] = axes["budget"] or [str(n) for n in dict.fromkeys(n for sizes in own.values() for n in sizes)]
    methods, budgets = chosen(axes, problems)
    sizes = dict.fromkeys(methods, budgets) if chooses or typed["budget"] else dict(zip(methods, own.values()))
    return tuple((m, budget) for m in methods for budget in (sizes[m] if m.takes_budget else (None,)))


def _name(label: str) -> str:
    return label.partition("(")[0]


def _options(label: str) -> tuple[tuple[str, Any], ...]:
    return choose.changed(_name(label), choose.from_label(label))


def _check(method: MethodChoice, budget: Budget | None) -> None:
    instance = choose.make(method.name, dict(method.options))
    refuse_oracle(method.name, instance)
    if instance.takes_budget:
        check_budget(method.name, instance, budget)


def _check_lengths(values: Mapping[str, Any]) -> None:
    shortest = min(values["new_tokens"])
    if values.get("stretch", 0) > shortest:
        raise UserError(
            f"--stretch {values['stretch']} is longer than the shortest answer; give at most {shortest} (--new-tokens)."
        )
    if (longest := max(values["prompts"]) + max(values["new_tokens"])) > LONGEST:
        raise UserError(f"--prompt and --new-tokens make {longest} tokens; together they must be at most {LONGEST}.")
