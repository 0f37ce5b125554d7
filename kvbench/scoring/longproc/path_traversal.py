"""Score a route: right if every line of it is right; in part by the lines up to the first wrong one, which counts."""

from __future__ import annotations

from kvbench.scoring.longproc.tags import between, result


def score_route(text: str, reference: str) -> dict[str, float]:
    """Score the route between ``<Route>`` tags; the scorer is LongProc's `eval_path_traversal`.

    As there, the first wrong line counts as right in the partial score, so any route at all scores something.
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
