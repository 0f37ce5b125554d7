"""Score a route: accuracy and partial score are 1 if every line is right.

Otherwise accuracy is 0, and the partial score is the number of the output's lines up to and including the first wrong
line, divided by the number of lines of the right route.
"""

from __future__ import annotations

from kvbench.scoring.longproc.tags import between, result


def score_route(text: str, reference: str) -> dict[str, float]:
    """Score the route between ``<Route>`` tags as LongProc's `eval_path_traversal` does.

    The partial score counts the first wrong line as if it were right. An output with a route therefore always has a
    partial score above 0. If one route is the beginning of the other, no line is wrong, and all lines of the shorter
    route are counted. reference: the lines of the right route.
    """
    route = between(text, "Route")
    if route is None:
        return result(0.0, 0.0, False)
    wanted = reference.strip().split("\n")
    lines = route.split("\n")
    if lines == wanted:
        return result(1.0, 1.0, True)
    pairs = list(zip(wanted, lines))
    wrong = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
    return result(0.0, (wrong + 1) / len(wanted), True)
