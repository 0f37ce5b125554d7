"""What a report shows of a cell, said once for every format.

For people three small tables that fit 80 columns: `quality`, `cost` and, where there is something to tell, `samples`;
each is a list of (title, how a cell prints). For programs `flat`, the whole cell as plain data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvbench.console.progress import size
from kvbench.eviction.budget import label
from kvbench.report.cells import PASS_AT, SCORES, Against, CellRow
from kvbench.report.stats import Estimate
from kvbench.report.tables import TaskTable

Show = Callable[[CellRow], str]
Columns = list[tuple[str, Show]]
NOTHING = "-"


def quality(table: TaskTable, plus_minus: str) -> Columns:
    """How good a cell is, beside its baseline."""
    others = [column for column in SCORES if column != table.headline]

    def score(cell: CellRow) -> str:
        text = f"{_number(cell.score.mean)} {_error(cell.score, plus_minus)}".rstrip()
        return f"{text} ({cell.progress})" if cell.progress else text

    base = next((c.against.baseline for c in table.cells if c.against), "")
    columns: Columns = [
        *_name(),
        (SCORES[table.headline], score),
        *((SCORES[o], lambda c, o=o: _number(c.others[o])) for o in others),
        (f"minus {base}", _difference),
        ("verdict", lambda c: _verdict(c.against) if c.against else NOTHING),
    ]
    return _filled(table, columns)


def cost(table: TaskTable) -> Columns:
    """What a cell keeps of the full cache's score and what that costs: entries, bytes, speed."""
    columns: Columns = [
        *_name(),
        ("score kept", lambda c: _percent(c.of_full["score"]) if c.of_full else NOTHING),
        ("KV peak", lambda c: NOTHING if math.isnan(c.kv_bytes_peak) else size(c.kv_bytes_peak)),
        ("of full", lambda c: _percent(c.of_full["bytes"]) if c.of_full else NOTHING),
        ("after", lambda c: _entries(c.entries_after_evict)),
        ("peak", lambda c: _entries(c.entries_peak)),
        ("tok/s", lambda c: NOTHING if math.isnan(c.tokens_per_second) else f"{c.tokens_per_second:,.0f}"),
        ("speed", lambda c: _times_full(c)),
    ]
    return _filled(table, columns)


def samples(table: TaskTable) -> Columns:
    """What the scores rest on. Nothing when every cell has the same number of samples, all of them whole."""
    counts: Columns = [
        ("questions", lambda c: str(c.score.questions)),
        ("samples", lambda c: str(c.samples)),
    ]
    equal = len({(c.score.questions, c.samples) for c in table.cells}) == 1
    columns: Columns = [
        *_name(),
        *([] if equal else counts),
        ("truncated", lambda c: _percent(c.truncated)),
        ("no answer", lambda c: _percent(c.no_answer)),
        ("failed", lambda c: str(c.failed) if c.failed else NOTHING),
        ("not scored yet", lambda c: str(c.unscored) if c.unscored else NOTHING),
        *((f"pass@{k}", lambda c, k=k: _number(c.pass_at.get(k, math.nan))) for k in PASS_AT if k > 1),
        ("maj@n", lambda c: _number(c.maj)),
    ]
    whole = not any(c.truncated > 0 or c.no_answer > 0 or c.failed or c.unscored or c.pass_at for c in table.cells)
    return [] if whole and equal else _filled(table, columns)


def _name() -> Columns:
    return [
        ("method", lambda c: c.method + ("" if c.decode_bounded or not c.evicts else " *")),
        ("budget", lambda c: NOTHING if c.budget is None else label(c.budget)),
    ]


def _filled(table: TaskTable, columns: Columns) -> Columns:
    """Without the columns in which no cell has anything."""
    fixed = [title for title, _ in _name()]
    return [(t, s) for t, s in columns if t in fixed or any(s(cell) != NOTHING for cell in table.cells)]


def flat(table: TaskTable, cell: CellRow) -> dict[str, Any]:
    """A cell as plain data; None where there is no number."""
    against = cell.against
    ratios = cell.of_full or {}
    data: dict[str, Any] = {
        "group": table.group,
        "task": table.task,
        "method": cell.method,
        "budget": None if isinstance(cell.budget, float) else cell.budget,
        "budget_share": cell.budget if isinstance(cell.budget, float) else None,
        "interval": table.interval if cell.evicts else None,
        "decode_bounded": cell.decode_bounded,
        "headline": table.headline,
        "mean": cell.score.mean,
        "se": cell.score.se,
        "se_fixed": cell.score.se_fixed,
        "low": cell.score.low,
        "high": cell.score.high,
        "interval_rule": cell.score.rule,
        **cell.others,
        "floor": cell.floor,
        **{f"pass_at_{k}": cell.pass_at.get(k) for k in PASS_AT},
        "maj_at_n": cell.maj,
        "questions": cell.score.questions,
        "samples": cell.samples,
        "failed": cell.failed,
        "unscored": cell.unscored,
        "truncated": cell.truncated,
        "no_answer": cell.no_answer,
        "entries_after_evict": cell.entries_after_evict,
        "entries_peak": cell.entries_peak,
        "entries_mean": cell.entries_mean,
        "kv_bytes_peak": cell.kv_bytes_peak,
        "kv_bytes_mean": cell.kv_bytes_mean,
        "tokens_per_second": cell.tokens_per_second,
        "roofline_share": cell.roofline_share,
        "evict_share": cell.evict_share,
        "score_of_full": ratios.get("score"),
        "bytes_of_full": ratios.get("bytes"),
        "speed_of_full": ratios.get("speed"),
        "baseline": against.baseline if against else None,
        "diff": against.diff if against else None,
        "diff_low": against.low if against else None,
        "diff_high": against.high if against else None,
        "p_holm": against.p if against else None,
        "p_sign_flip": against.p_sign_flip if against else None,
        "test": against.found.test if against else None,
        "df": against.found.df if against else None,
        "verdict": against.verdict if against else None,
        "smallest_drop": against.smallest_drop if against else None,
        "progress": cell.progress or None,
    }
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in data.items()}


def _error(score: Estimate, plus_minus: str) -> str:
    """The standard error; where all scores are 0 or all 1 it says nothing, and the interval's bound stands there."""
    if score.rule == "rule of three":
        least, most = ("≥", "≤") if plus_minus == "±" else (">=", "<=")
        return f"{most}{score.high:.3f}" if score.mean == 0 else f"{least}{score.low:.3f}"
    return "" if math.isnan(score.se) else f"{plus_minus}{score.se:.3f}"


def _difference(cell: CellRow) -> str:
    if cell.against is None:
        return NOTHING
    text = f"{cell.against.diff:+.3f}"
    return text if math.isnan(cell.against.low) else f"{text} ({cell.against.low:+.2f}, {cell.against.high:+.2f})"


def _times_full(cell: CellRow) -> str:
    speed = cell.of_full["speed"] if cell.of_full else math.nan
    return NOTHING if math.isnan(speed) else f"{speed:.2f}x"


def _number(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.3f}"


def _percent(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.0%}"


def _entries(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def _verdict(against: Against) -> str:
    return against.verdict if against.found.test == "none" else f"{against.verdict} p{_p(against.p)}"


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"={value:.3f}"
