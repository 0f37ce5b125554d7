"""Compares kvbench's scorers with recorded results of the official scorers ("goldens"), one recorded result at a time.

The name of a file of goldens selects the scorer (`FILES`); each line of the file is one golden, with the input and the
official result. Numbers may differ by 1e-9 (relative). Answers of mathematics tasks are scored as in a run, in a
process that is killed if it hangs; programs run in the sandbox.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import KVBenchError, UserError, quote
from kvbench.report import stats
from kvbench.scoring import choice, longbench, longgenbench, ruler, sandbox
from kvbench.scoring.gsm8k import lm_eval_filters
from kvbench.scoring.html_to_tsv import score_tsv
from kvbench.scoring.judge import parse
from kvbench.scoring.livecodebench import extract_code, grade
from kvbench.scoring.mrcr import score_copy
from kvbench.scoring.overlap import rouge_l_recall
from kvbench.scoring.pool import ScorePool
from kvbench.sources.data import read_jsonl
from kvbench.task import Doc, Output, Turn
from kvbench.taskkit.names import get_task

Golden = Mapping[str, Any]
Values = dict[str, Any]  # by the golden's field names


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGolden:
    """One golden, with the result of kvbench's scorer or the scorer's `error`."""

    file: str
    id: str
    note: str
    expected: Values
    found: Values  # kvbench's results; `found` is also the key in the JSON document
    error: str = ""

    @property
    def differences(self) -> list[str]:
        """Return the names of the values that differ from the official result. `error` must be empty."""
        return [name for name, value in self.found.items() if not _same(value, self.expected[name])]

    @property
    def equal(self) -> bool:
        return not self.error and not self.differences


def read_goldens(folder: Path) -> dict[str, list[Golden]]:
    """Return the goldens in a folder, by file name. Only files whose names are in `FILES` are read. Raises UserError if
    the folder has no such file, or if such a file cannot be read."""
    files = [path for path in sorted(folder.glob("*.jsonl")) if path.name in FILES]
    if not files:
        raise UserError(f"{quote(folder)} holds no results of official scorers; expected {', '.join(sorted(FILES))}.")
    return {path.name: [row for _, row in read_jsonl(path, str(path))] for path in files}


def audit(goldens: Mapping[str, Sequence[Golden]]) -> Iterator[ScoredGolden]:
    """Score the input of every golden, and yield the golden with kvbench's result or the scorer's error."""
    with ScorePool() as pool:
        for name, rows in goldens.items():
            for number, row in enumerate(rows, start=1):
                yield _compare(name, row, str(row.get("id", f"line {number}")), pool)


def _compare(file: str, row: Golden, name: str, pool: ScorePool) -> ScoredGolden:
    computed: Values = {}
    expected: Values = {}
    error = ""
    try:
        computed = {field: _plain(value) for field, value in FILES[file](row, pool).items()}
        expected = {field: row[field] for field in computed}
    except KVBenchError as failed:
        error = str(failed)
    except KeyError as missing:
        error = f"the golden has no field {missing}"
    except Exception as failed:  # a scorer that raises is a finding, not a crash of the audit
        error = f"{type(failed).__name__}: {failed}"
    return ScoredGolden(
        file=file, id=name, note=str(row.get("note", "")), expected=expected, found=computed, error=error
    )


def _plain(value: Any) -> Any:
    """Return a scorer's value as JSON can hold it: NaN becomes None, a tuple becomes a list."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return list(value) if isinstance(value, tuple) else value


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and all(_same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, bool) != isinstance(theirs, bool):
        return False
    if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        return math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12)
    return bool(ours == theirs)


# --- one function for each file ---------------------------------------------------------------------------------------


def _leak(row: Golden, pool: ScorePool) -> Values:
    return {"expected": rouge_l_recall(row["reference"], row["text"])}


def _longbench(row: Golden, pool: ScorePool) -> Values:
    return {"expected": longbench.score_row(row["dataset"], row["prediction"], row["answers"], row["all_classes"])}


def _longbench_v2(row: Golden, pool: ScorePool) -> Values:
    letter = choice.longbench_v2(row["output"])
    return {"extracted": letter, "expected": letter == row["gold"]}


def _longgenbench(row: Golden, pool: ScorePool) -> Values:
    entries = longgenbench.read_entries(row["prefix"] + row["output"], row["type"])
    events = (row[f"checks_{kind}"] for kind in ("once", "range", "periodic"))
    return {
        "expected_completion": longgenbench.completion(entries, row["number"]),
        "expected_questions": [question for of_kind in events for question in longgenbench.questions(entries, of_kind)],
    }


def _ruler(row: Golden, pool: ScorePool) -> Values:
    metric = {"string_match_all": ruler.string_match_all, "string_match_part": ruler.string_match_part}[row["metric"]]
    outputs = [ruler.postprocess(text) for text in row["predictions"]]
    each = [metric([text], [references]) for text, references in zip(outputs, row["references"], strict=True)]
    return {"expected": metric(outputs, row["references"]), "expected_per_row": each}


def _math(row: Golden, pool: ScorePool) -> Values:
    doc = Doc(doc_id=row["id"], turns=(Turn(question=""),), reference=row["gold"])
    output = Output(text=row["output"], stop_reason="stop", prompt_tokens=0, output_tokens=0, thinking=row["thinking"])
    score = pool.submit(get_task("math500"), doc, output).result()
    if score.value is None:
        raise UserError(score.note)
    return {"expected": score.value == 1.0, "expected_strict_boxed": score.strict == 1.0}


def _gsm8k(row: Golden, pool: ScorePool) -> Values:
    scores = lm_eval_filters(row["output"], row["gold"])
    return {"expected_strict": scores["lm_eval_strict"], "expected_flexible": scores["lm_eval_flexible"]}


def _gpqa(row: Golden, pool: ScorePool) -> Values:
    first, last = choice.simple_evals(row["output"]), choice.letter_last(row["output"])
    return {
        "simple_evals_extracted": first,
        "expected_simple_evals": first == row["gold"],
        "proposed_extracted": last,
        "expected_proposed": last == row["gold"],
    }


def _mrcr(row: Golden, pool: ScorePool) -> Values:
    return {"expected": score_copy(row["response"], row["answer"], row["random_string_to_prepend"])["score"]}


def _mt_bench(row: Golden, pool: ScorePool) -> Values:
    parsers: dict[str, Callable[[str], Any]] = {"single_rating": parse.rating, "pairwise": parse.verdict}
    return {"expected": parsers[row["metric"]](row["judgment"])}


def _html_to_tsv(row: Golden, pool: ScorePool) -> Values:
    scores = score_tsv(row["prediction"], row["reference"])
    return {"expected": {name: scores[name] for name in row["expected"]}}


def _extract_code(row: Golden, pool: ScorePool) -> Values:
    return {"expected": extract_code(row["output"])}


def _livecodebench(row: Golden, pool: ScorePool) -> Values:
    tests = row["input_output"]
    options = {"sandbox": sandbox.choose(), "seconds": row["timeout_s"]}
    verdict = grade(row["code"], tests["inputs"], tests["outputs"], tests["fn_name"], **options).lcb
    return {
        "expected_pass": verdict.passed,
        "expected_error_code": verdict.code,
        "expected_results": list(verdict.results),
    }


def _stats(row: Golden, pool: ScorePool) -> Values:
    match row["metric"]:
        case "pass_at_k":
            return {"expected": stats.pass_at_k(row["n"], row["c"], row["k"])}
        case "cluster_se":
            estimate = stats.estimate(row["scores"])
            return {"mean": estimate.mean, "se_clustered": estimate.se, "se_fixed_questions": estimate.se_fixed}
        case "paired_diff":
            compared = stats.paired(row["scores_a"], row["scores_b"], permutations=1)
            return {"mean_diff": compared.diff, "se_paired": compared.se}
    raise UserError(f"the metric {quote(row['metric'])} is unknown; use pass_at_k, cluster_se or paired_diff.")


FILES: dict[str, Callable[[Golden, ScorePool], Values]] = {
    "gpqa_extract.jsonl": _gpqa,
    "gsm8k_filters.jsonl": _gsm8k,
    "html_to_tsv.jsonl": _html_to_tsv,
    "leak.jsonl": _leak,
    "livecodebench.jsonl": _livecodebench,
    "livecodebench_extract.jsonl": _extract_code,
    "longbench.jsonl": _longbench,
    "longbench_v2_extract.jsonl": _longbench_v2,
    "longgenbench.jsonl": _longgenbench,
    "math.jsonl": _math,
    "mrcr.jsonl": _mrcr,
    "mt_bench_parse.jsonl": _mt_bench,
    "passk_stats.jsonl": _stats,
    "ruler.jsonl": _ruler,
}
