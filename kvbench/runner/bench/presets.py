"""The presets of `kvbench bench --preset`: each repeats the measurements of one table of a paper.

A preset names what to measure and which of the paper's numbers to show beside it. The numbers themselves lie in one
file with their sources (`kvbench.sources.published`). Imports no torch, so that the command can check names quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbench.sources.published import Published, published


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the output: one figure that a paper prints, beside the same figure as kvbench measures it.

    Attributes:
        head: title of the column, for example "tok/s".
        ours: the name of the measured figure in `kvbench.cli.bench_published.OURS`.
        form: the format of both figures.
        table, metric, task: the values by which the paper's number is found in published.csv (columns table_or_figure,
            metric and task). `task` may hold fields of the load in braces, such as {new_tokens}, which are filled in.
    """

    head: str
    ours: str
    form: str
    table: str
    metric: str
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One table of a paper: what to measure, and where its numbers are in published.csv.

    Attributes:
        paper: the paper's name in published.csv; what: the table's subject.
        shapes: the table's models as names in `SHAPES`, each with the model's name in published.csv. The first shape is
            measured unless the user names another shape.
        systems: per method, its label in kvbench, its name in published.csv, and its budgets (none for the full cache).
        options: options of `kvbench bench`, as the user would type them.
        unknown: sentences on settings that the paper does not state, or that differ from ours.
        also: further tables or texts in published.csv; their numbers are listed below the table.
    """

    paper: str
    what: str
    shapes: Mapping[str, str]
    systems: tuple[tuple[str, str, tuple[int, ...]], ...]
    options: Mapping[str, str]
    columns: tuple[Column, ...]
    unknown: str
    also: tuple[str, ...] = ()

    def printed(
        self, column: Column, shape: str, method: str, budget: int | None, load: Mapping[str, int | None]
    ) -> Published | None:
        """Return the number that the paper prints in a column, or None if it prints none.

        shape: the measured shape; for a shape that the table lacks, the numbers of the table's first shape are used.
        method: the method's label in kvbench. budget: the paper's budget. load: the paper's load, as {field: value}.
        """
        model = self.shapes.get(shape) or next(iter(self.shapes.values()))
        task = column.task.format_map({name: short(value) for name, value in load.items()})
        wanted = model, self.their_name(method), task, column.metric
        same = (r for r in self.numbers(column.table) if (r.model, r.method, r.task, r.metric) == wanted)
        return next((row for row in same if row.entries in (budget, None)), None)

    def their_name(self, method: str) -> str | None:
        """Return the paper's name of a method; None if the table lacks the method. method: its label in kvbench."""
        return next((theirs for ours, theirs, _ in self.systems if ours == method), None)

    def numbers(self, *tables: str) -> list[Published]:
        """Return all numbers that the paper prints in these tables."""
        return [row for row in published() if row.paper == self.paper and row.table_or_figure in tables]


def short(tokens: int | None) -> str:
    """Return a number of tokens as the papers write it: 32K for 32768. A number that is no multiple of 1024 stays as it
    is."""
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


_FORESIGHT = "ForesightKV (arXiv 2602.03203)"
_GKV = "G-KV (arXiv 2512.00504)"
_LOOKAHEAD = "LookaheadKV (arXiv 2603.10899)"
_QWEN_7B = {"r1-distill-qwen-7b": "DeepSeek-R1-Distill-Qwen-7B"}
_ONCE = {"repeats": "1", "baseline": "none"}


def _columns(table: str, task: str, *columns: tuple[str, str, str, str]) -> tuple[Column, ...]:
    """Return the columns of one table. task: see `Column`; columns: (head, ours, form, metric) of each."""
    return tuple(Column(head=h, ours=o, form=f, table=table, metric=m, task=task) for h, o, f, m in columns)


PRESETS: dict[str, Preset] = {
    "foresightkv-table3": Preset(
        paper=_FORESIGHT,
        what="throughput at the largest batch",
        shapes={"qwen3-4b": "Qwen3-4B"},
        systems=(("full", "Full", ()), ("foresightkv", "ForesightKV", (1024, 2048, 4096, 8192))),
        options=_ONCE | {"sequences": "max", "new-tokens": "8192,16384,32768", "interval": "256"},
        columns=_columns(
            "Table 3",
            "generation {new_tokens}",
            ("sequences", "sequences", "{:,.0f}", "max concurrent batch"),
            ("tok/s", "rate", "{:,.1f}", "throughput"),
            ("over full", "rate_over_full", "{:.2f}x", "throughput ratio vs full"),
        ),
        unknown="The paper does not say how long its prompts are, nor what limits the batches of its evicting methods.",
    ),
    "foresightkv-e6": Preset(
        paper=_FORESIGHT,
        what="the time of evictions",
        shapes={"qwen3-4b": "Qwen3-4B"},
        systems=(("rkv", "R-KV", (2048,)), ("foresightkv", "ForesightKV", (2048,))),
        options=_ONCE | {"sequences": "64", "new-tokens": "32768", "interval": "256"},
        columns=_columns(
            "Appendix E.6",
            "generate {new_tokens} x batch {sequences}",
            ("total s", "seconds", "{:,.4g}", "total time"),
            ("evicting s", "evict_seconds", "{:,.3g}", "eviction time"),
            ("evicting %", "evict_percent", "{:.2g}", "eviction share of time"),
        ),
        unknown="The paper does not name the hardware, nor the length of its prompts.",
    ),
    "gkv-table2": Preset(
        paper=_GKV,
        what="throughput at equal batches",
        shapes=_QWEN_7B | {"llama-3.1-8b": "DeepSeek-R1-Distill-Llama-8B"},
        systems=(("full", "Full-KV", ()), ("rkv", "R-KV", (2048,)), ("gkv", "G-KV", (512, 1024, 2048))),
        options=_ONCE | {"sequences": "32,64,128", "new-tokens": "16384", "interval": "128"},
        columns=_columns(
            "Table 2",
            "DeepScaleR 1024 problems, batch {sequences}",
            ("tok/s", "rate", "{:,.1f}", "throughput"),
        ),
        unknown="The paper's answers end by themselves, after 16K tokens at most, and a batch waits for its longest; "
        "here all answers have the full length. Its Llama-8B has batches of 16, 32 and 64.",
    ),
    "gkv-table3": Preset(
        paper=_GKV,
        what="the time of evictions (Tables 3 and 4)",
        shapes=_QWEN_7B,
        systems=(
            ("gkv(form=local)", "local score", (512, 1024, 2048)),
            ("gkv", "global score", (512, 1024, 2048)),
        ),
        options=_ONCE | {"sequences": "32", "new-tokens": "4096", "interval": "128"},
        columns=(
            *_columns(
                "Table 3",
                "compression step, batch {sequences}",
                ("ms per eviction", "evict_each_ms", "{:.3g}", "time per compression"),
            ),
            *_columns(
                "Table 4",
                "decoding, batch {sequences}",
                ("of decoding %", "evict_share_percent", "{:.2g}", "compression share of decode time"),
            ),
        ),
        unknown="The paper does not say how long prompts and answers are, nor name the hardware of these tables.",
    ),
    "lookaheadkv-latency": Preset(
        paper=_LOOKAHEAD,
        what="time to the first token",
        shapes={"llama-3.1-8b": "LLaMA and Qwen models"},
        systems=(
            ("full", "Full", ()),
            ("snapkv", "SnapKV", (128,)),
            ("pyramidkv", "PyramidKV", (128,)),
            ("laq", "LAQ", (128,)),
            ("lookaheadkv", "LookaheadKV", (128,)),
        ),
        options={"repeats": "3", "baseline": "none", "sequences": "1", "prompt": "4096,8192,16384,32768"}
        | {"new-tokens": "32", "interval": "128"},
        columns=_columns(
            "overhead",
            "time to first token, prompt {prompt}",
            ("first token s", "first", "{:.3g}", "time to first token"),
            ("over full %", "first_over_full_percent", "{:+.3g}", "overhead of eviction"),
        ),
        unknown="kvbench's copy of the paper's text lacks the tables of latency. SpecKV is not measured, because it "
        "needs a trained draft model.",
        also=("overhead of others", "abstract / text 1"),
    ),
}
