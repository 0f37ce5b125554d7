"""Needle in a haystack: one sentence at eleven depths of texts from 1K to 32K tokens.

Each depth has five needles, each in a haystack of its own (`cluster_id`) that starts at another place in the text.
Noise has five such places: from the sixth haystack on they return, with other needles. Score: share of the needle's key
words in the output. The category is the depth. docs/tasks.md describes the variants.
"""

from __future__ import annotations

from kvbench.registry import tasks
from kvbench.scoring.ruler import score_output
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task
from kvbench.taskkit.ruler import needles
from kvbench.taskkit.ruler.depth import DEPTHS, Grid
from kvbench.taskkit.ruler.material import ESSAYS, Sources
from kvbench.taskkit.ruler.reading import document, place_of_needle, room_for

NEEDLES = 5  # per depth, without --limit
KINDS = {
    "noise": needles.number,
    "essay": needles.number,
    "sandwich": needles.sandwich,
    "essay-sandwich": needles.sandwich,
    "paraphrase": needles.paraphrase,
    "essay-paraphrase": needles.paraphrase,
}
NEW_TOKENS = 64


@tasks.register("niah")
class NeedleInAHaystack(Task):
    suite = "long context"
    summary = "needle in a haystack, 11 depths of 5 needles at 1K to 32K"
    variants = tuple(KINDS)
    lengths = (1024, 2048, 4096, 8192, 16384, 32768)
    cheap_score = True
    endless = True

    @property
    def manifest(self) -> Manifest | None:  # type: ignore[override]  # the data of the haystack, if any
        return ESSAYS if "essay" in self.variant else None

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        cells = [(number, depth) for number in range(-(-(limit or self.size()) // len(DEPTHS))) for depth in DEPTHS]
        with room_for(self, NEW_TOKENS) as room:
            grid = Grid(
                room=room,
                material=Sources(source, self.name),
                essays="essay" in self.variant,
                needle=KINDS[self.variant],
            )
            return [
                document(f"{depth:03d}-{number}", grid.row(depth, number), f"depth {depth:03d}%")
                for number, depth in cells[:limit]
            ]

    def gen(self, model_type: str) -> GenSpec:
        return GenSpec(max_new_tokens=NEW_TOKENS, thinking=False)

    def score(self, doc: Doc, output: Output) -> Score:
        aux = place_of_needle(doc)
        if "sandwich" in self.variant:
            aux |= _rouge(output.text)
        return score_output(output.text, doc.reference, aux=aux)

    def size(self) -> int:
        return NEEDLES * len(DEPTHS)


def _rouge(text: str) -> dict[str, float]:
    """Return the score `rouge1_recall`: the share of the words of the sandwich sentence that an output contains.
    Returns {} without the package rouge (extra `longbench`)."""
    try:
        from rouge import Rouge
    except ModuleNotFoundError:
        return {}
    try:
        return {
            "rouge1_recall": float(Rouge(metrics=["rouge-1"]).get_scores(text, needles.SANDWICH)[0]["rouge-1"]["r"])
        }
    except ValueError:  # an output without words
        return {"rouge1_recall": 0.0}
