"""Writes an outcome of a comparison as JUnit's XML, which most CI servers read: one test case per cell."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from kvbench.compare import words
from kvbench.compare.outcome import Judged, Outcome
from kvbench.console.terminal import clean


def junit(outcome: Outcome) -> str:
    """Return the XML. Critical cells and unfinished runs that make the comparison fail are test cases with a failure.
    Other cells that fail or are undecided are marked as skipped, with the reason."""
    cases = [_case(one, outcome) for one in outcome.judged]
    cases += [_unfinished(words.unfinished(*run)) for run in outcome.wanting.items()]
    failed, skipped = (sum(word in case for case in cases) for word in ("<failure ", "<skipped "))
    counts = f'tests="{len(cases)}" failures="{failed}" skipped="{skipped}" errors="0"'
    suite = f"<testsuite name={_value(f'kvbench compare {outcome.base.name} {outcome.new.name}')} {counts}>"
    return "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites {counts}>", suite, *cases, _END])


_END = "</testsuite>\n</testsuites>"


def _case(one: Judged, outcome: Outcome) -> str:
    name = words.name(one, outcome).removesuffix(f" on {one.key.task}")
    head = f"<testcase classname={_value(one.key.task)} name={_value(name)}>"
    said = f"{words.verdict(one)}{'. ' + words.fails(one) if one.reasons else ''}"
    if words.is_failing(one, outcome):
        body = f"<failure message={_value(said)}/>"
    elif one.reasons or one.verdict == "undecided":
        body = f"<skipped message={_value(said)}/>"
    else:
        body = f"<system-out>{escape(clean(said))}</system-out>"
    return f"{head}{body}</testcase>"


def _unfinished(said: str) -> str:
    return f'<testcase classname="run" name="finished"><failure message={_value(said)}/></testcase>'


def _value(text: str) -> str:
    return quoteattr(clean(text))  # `clean` escapes every character that XML may not hold
