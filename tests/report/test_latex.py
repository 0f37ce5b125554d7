"""LaTeX: every special character is text, and the tables compile in an article with booktabs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.report import latex
from kvbench.report.latex import escaped
from kvbench.report.load import load
from kvbench.report.render import FORMATS
from kvbench.report.scores import ScoreReport

SCORES = [1.0, 0.5, 0.25, 1.0, 0.75, 0.0, 1.0, 0.5]
HOSTILE = [
    r"\input{/etc/passwd}",
    "a&b%c#d_e$f",
    "{}~^",
    "[1ex] x",
    "*y",
    "ü ≤ 漢 \u202e",
    "<a>|`'\"--b",
    "\\end{table}",
    "a\nb",
]
ENGINES = {"pdflatex": ["-interaction=nonstopmode", "-halt-on-error"], "tectonic": ["--only-cached"]}
ARTICLE = r"""\documentclass[10pt,a4paper]{article}
\usepackage{booktabs,graphicx}
\begin{document}
\input{tables}
\end{document}
"""


@pytest.fixture
def report(make_run: Callable, rows: Callable) -> ScoreReport:
    """Two tasks with hostile names, methods with hostile names."""
    parts = [
        rows(method, budget, SCORES if place % 2 else SCORES[::-1], task=task, floor=0.1)
        for task in ("walk", HOSTILE[1])
        for place, (method, budget) in enumerate([("full", None), *((name, 48) for name in HOSTILE)])
    ]
    return ScoreReport.make(load([make_run("r1", *parts)]))


def test_every_special_character_is_text() -> None:
    assert escaped("a_b & 50% #1 $x {y}") == r"a\_b \& 50\% \#1 \$x \{y\}"
    assert escaped("\\x ~ ^") == r"\textbackslash{}x \textasciitilde{} \textasciicircum{}"
    assert escaped("é") == r"\textbackslash{}u00e9"
    assert escaped("[1] *") == "{[}1{]} {*}"


def test_numbers_have_minus_signs_and_names_hyphens() -> None:
    assert escaped("-0.889 (-0.89, -0.80)") == "$-$0.889 ($-$0.89, $-$0.80)"
    assert escaped("snapkv-2 --x 1-2") == "snapkv-2 -{}-x 1-2"
    assert escaped("0.5 ±0.1") == r"0.5 $\pm$0.1"


def test_commands_are_only_ours_and_balanced(report: ScoreReport) -> None:
    shown = FORMATS["latex"](report)
    assert shown.isascii()
    body = shown.split("\n", 1)[1]  # the first line is a comment
    ours = "begin end centering caption footnotesize toprule midrule bottomrule par smallskip linewidth pm "
    ours += "label setlength abovecaptionskip belowcaptionskip tabcolsep raggedright "
    ours += "sbox ifdim wd resizebox usebox else fi"
    texts = "textbackslash textasciitilde textasciicircum"
    assert set(re.findall(r"\\([a-zA-Z]+)", body)) <= {*ours.split(), *texts.split()}
    plain = re.sub(r"\\[\\{}$&#%_`]", "", body)
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0
    assert not set("#%~^") & set(plain)
    opened = re.findall(r"\\(begin|end)\{(\w+)\}", body)
    stack: list[str] = []
    for kind, name in opened:
        if kind == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert not stack


def test_rows_have_as_many_cells_as_columns(report: ScoreReport) -> None:
    for sides, inside in re.findall(
        r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", FORMATS["latex"](report), re.S
    ):
        rows = [line for line in inside.splitlines() if line.endswith(r"\\")]
        assert len(rows) > 1
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(sides)}


def test_every_table_has_a_label_of_its_own(report: ScoreReport) -> None:
    shown = FORMATS["latex"](report)
    labels = re.findall(r"\\label\{([^}]*)\}", shown)
    assert len(labels) == len(set(labels)) == shown.count(r"\begin{table}")
    assert all(re.fullmatch(r"tab:[a-z0-9-]+", label) for label in labels)
    assert latex._label("walk", 1, taken := set()) == "tab:walk-1"
    assert latex._label("Walk!", 1, taken) == "tab:walk-2-1"


def test_the_tables_compile(report: ScoreReport, tmp_path: Path) -> None:
    engine = next((name for name in ENGINES if shutil.which(name)), None)
    if engine is None:
        pytest.skip(f"no LaTeX on this machine ({', '.join(ENGINES)}); escapes and structure are tested above")
    (tmp_path / "tables.tex").write_text(FORMATS["latex"](report))
    (tmp_path / "article.tex").write_text(ARTICLE)
    done = subprocess.run(
        [engine, *ENGINES[engine], "article.tex"], cwd=tmp_path, capture_output=True, text=True, errors="replace"
    )
    if engine == "pdflatex" and "booktabs.sty' not found" in done.stdout:
        pytest.skip("this LaTeX has no booktabs; escapes and structure are tested above")
    assert done.returncode == 0, done.stdout[-3000:]
    assert not re.findall(r"Overfull .hbox.*", done.stdout)
    assert "multiply defined" not in done.stdout
    assert (tmp_path / "article.pdf").stat().st_size > 10_000
