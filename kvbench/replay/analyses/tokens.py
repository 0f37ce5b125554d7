"""Makes an HTML page about one answer: which tokens a method holds or has dropped at some moments and at the end.

The answer is the first of the task; `--sample ID` names another question. A block is `--interval` successive tokens of
the answer. The moments are the beginnings of up to `SHOWN` blocks, evenly spread, after any eviction at this point. For
each moment and for the end, the page shows every token that was read, in one of three states:

    dropped  fewer than half of the caches (one per layer and KV head) hold the token
    recent   otherwise, if the token is one of the newest 16
    kept     otherwise

The depth of the colour shows `held`, the share of caches that hold the token. The page is one file without scripts or
external resources. Token text is untrusted and appears escaped.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Sequence

from kvbench.console import terminal
from kvbench.eviction.budget import entries
from kvbench.replay.analyses.api import WINDOW, MethodAnalysis, Moment, Row, Study, Table, fixed, named, register, size

SHOWN = 3
STATES = ("kept", "recent", "dropped")
STYLE = """
body { font: 14px/1.7 monospace; margin: 2em; max-width: 110ch; color: #111; background: #fff }
h1, h2, h3 { font-family: sans-serif; line-height: 1.3 }
p { overflow-wrap: anywhere }
span { white-space: pre-wrap }
.kept { background: rgb(0 158 115 / var(--held)) }
.recent { background: rgb(86 180 233 / var(--held)) }
.dropped { color: #999; text-decoration: line-through; background: rgb(0 158 115 / var(--held)) }
.answer { border-bottom: 1px solid #d55e00 }
"""
HEAD = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
    f"<title>kept and dropped tokens</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
)
LEGEND = (
    '<p><span class="kept" style="--held:0.6">kept</span> <span class="recent" style="--held:0.6">recent</span> '
    '<span class="dropped" style="--held:0">dropped</span>; the deeper the colour, the more of the (layer, head) '
    'caches hold a token. <span class="answer">Underlined</span>: the answer.</p>\n'
)


@register("tokens")
class Tokens(MethodAnalysis):
    about = "the tokens of one answer that a method kept or dropped"
    file = "parquet"
    plotted = False

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        trace = study.traces[0]
        self._ids = (*trace.prompt, *trace.answer)
        self._text = {token: study.text(token) for token in set(self._ids)}
        self._rows: list[Row] = []

    def moment(self, moment: Moment) -> None:
        if 0 not in moment.traces or not (moment.index is None or self._chosen(moment)):
            return
        trace = self.study.traces[0]
        held = moment.held[:, moment.traces.index(0)].mean(dim=(0, 1)).tolist()  # [seen]
        for position, share in enumerate(held):
            token = self._ids[position]
            state = "dropped" if share < 0.5 else "recent" if position >= moment.seen - WINDOW else "kept"
            self._rows.append(
                {
                    "task": self.study.task,
                    "doc_id": trace.request.doc_id,
                    "sample": trace.sample,
                    **moment.chosen.columns,
                    "seen": moment.seen,
                    "end": moment.index is None,
                    "position": position,
                    "part": "prompt" if position < moment.prompt else "answer",
                    "token": token,
                    "text": self._text[token],
                    "held": share,
                    "state": state,
                }
            )

    def _chosen(self, moment: Moment) -> bool:
        """Return whether the page shows this moment, at which a block begins. It shows up to `SHOWN` of the blocks
        before which more tokens were read than fit into the budget."""
        budget = moment.chosen.budget
        most = 0 if budget is None else entries(budget, moment.prompt)
        due = [i for i in range(moment.count) if moment.prompt + i * self.study.interval > most]
        return moment.index in {due[i * len(due) // SHOWN] for i in range(SHOWN if due else 0)}

    def rows(self) -> list[Row]:
        """Return a row of results per method, budget, moment and token."""
        return self._rows

    @staticmethod
    def pages(rows: Sequence[Row]) -> dict[str, str]:
        return {"tokens.html": "".join(_page(rows))}

    @staticmethod
    def table(rows: Sequence[Row]) -> Table:
        head = ["task", "method", "budget", "tokens read", *STATES, "prompt held", "answer held"]
        lines = []
        for of in _views(rows):
            count = {state: str(sum(r["state"] == state for r in of)) for state in STATES}
            parts = ([r["held"] for r in of if r["part"] == part] for part in ("prompt", "answer"))
            shares = [fixed(sum(held) / len(held) if held else None) for held in parts]
            lines.append([of[0]["task"], of[0]["method"], size(of[0]), str(of[0]["seen"]), *count.values(), *shares])
        return head, lines


def _views(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield the rows of results of each method, budget and moment: a list with a row per token."""
    for _, of in itertools.groupby(rows, key=lambda r: (r["task"], r["method"], size(r), r["seen"], r["end"])):
        yield list(of)


def _page(rows: Sequence[Row]) -> Iterator[str]:
    yield HEAD + "<h1>Kept and dropped tokens</h1>\n" + LEGEND
    sample = cell = ""
    for of in _views(rows):
        first = of[0]
        if sample != (sample := f"{first['task']}, question {first['doc_id']}, sample {first['sample']}"):
            yield f"<h2>{_plain(sample)}</h2>\n"
        if cell != (cell := sample + named(first)):
            yield f"<h3>{_plain(named(first))}</h3>\n"
        when = "at the end" if first["end"] else "after an eviction"
        held = sum(row["held"] for row in of)
        yield f"<p>{first['seen']} tokens read, {when}: a cache holds {held:.1f} of them on average</p>\n<p>"
        for (state, part, tenths), run in itertools.groupby(of, key=_look):
            kind = state if part == "prompt" else f"{state} {part}"
            text = "".join(_plain(row["text"]) for row in run)
            yield f'<span class="{kind}" style="--held:{tenths / 10 * 0.8:.2f}">{text}</span>'
        yield "</p>\n"
    yield "</body>\n</html>\n"


def _look(row: Row) -> tuple[str, str, int]:
    return row["state"], row["part"], round(row["held"] * 10)


def _plain(text: str) -> str:
    """Return untrusted text as HTML without markup, control characters and text-direction characters. A visible sign
    stands before each line end."""
    return html.escape("\u21b5\n".join(terminal.clean(line) for line in text.split("\n")))
