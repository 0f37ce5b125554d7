"""Rewrites a PDF in canonical order. Objects are numbered in the order in which the document refers to them; resources
are sorted by name.

The converter numbers fonts and lists resources in the order of a hash table, which differs from call to call.
"""

from __future__ import annotations

import re
from typing import Any

_HEAD = re.compile(rb"(\d+) 0 obj\n")
_LENGTH = re.compile(rb"/Length (\d+)")
_REFERENCE = re.compile(rb"\b(\d+) 0 R\b")
_RESOURCES = re.compile(rb"(?<=<<\n)(?:[ \t]*/(?:xo|gs|fo|cs|sh|pt|im)\d+ [^\n]*\n)+")
_ROOT = re.compile(rb"/Root (\d+) 0 R")


def canonical(pdf: bytes) -> bytes:
    """Return the same document as bytes that depend only on its content."""
    objects = _objects(pdf)
    root = _ROOT.search(pdf, pdf.rindex(b"trailer"))
    assert root is not None
    order = [int(root[1])]
    for number in order:  # `order` grows in the loop; each object that is referred to is visited once
        head, _ = objects[number]
        order += [n for n in dict.fromkeys(map(int, _REFERENCE.findall(head))) if n not in order]
    numbers = {old: new for new, old in enumerate(order, 1)}
    out = bytearray(b"%PDF-1.7\n%\x80\x80\x80\x80\n\n")
    places = []
    for old in order:
        head, stream = objects[old]
        places.append(len(out))
        out += b"%d 0 obj\n" % numbers[old] + _REFERENCE.sub(lambda m: b"%d 0 R" % numbers[int(m[1])], head) + stream
        out += b"endobj\n\n"
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(order) + 1) + table
    out += b"trailer\n<<\n  /Size %d\n  /Root 1 0 R\n>>\nstartxref\n%d\n%%%%EOF\n" % (len(order) + 1, start)
    return bytes(out)


def _objects(pdf: bytes) -> dict[int, tuple[bytes, bytes]]:
    """Return the objects of a PDF by their numbers, as (head, stream) pairs. The head is the object's dictionary, with
    sorted resources. The stream is b"" if the object has none."""
    objects = {}
    place = 0
    while head := _HEAD.search(pdf, place):
        end = pdf.index(b"endobj", head.end())
        stream = pdf.find(b"stream\n", head.end(), end)
        body = pdf[head.end() : end if stream < 0 else stream]
        if stream >= 0:
            length = _LENGTH.search(body)
            assert length is not None
            end = pdf.index(b"endobj", stream + int(length[1]))
        objects[int(head[1])] = _RESOURCES.sub(_sorted, body), pdf[head.end() + len(body) : end]
        place = end
    return objects


def _sorted(match: re.Match[bytes]) -> bytes:
    return b"".join(sorted(match[0].splitlines(keepends=True), key=_by_name))


def _by_name(line: Any) -> tuple[int, bytes]:
    """Return the sort key of a line of resources; xo2 comes before xo10."""
    return len(line.split()[0]), bytes(line)
