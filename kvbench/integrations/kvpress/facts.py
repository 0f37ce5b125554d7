"""Facts about the scorer presses of kvpress 0.5.5: what each press reads, and why some presses cannot run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.declare import LayerWeight

VERSION = "0.5.5"

# Attention classes of transformers whose queries kvpress computes correctly. For other classes it omits their norms.
ATTENTION = ("LlamaAttention", "MistralAttention", "Phi3Attention", "Qwen2Attention", "Qwen3Attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a press reads beside keys and values, and how many entries it always keeps.

    Attributes:
        hidden: the tokens whose hidden states the press reads. "none": no token; "last": the newest token; "window":
            the newest `window_size` + 1 tokens; "many": any number of tokens, over which it computes statistics;
            "every": the token of each entry, so the press can score prompts only.
        stays: the names of the options whose sum is the number of entries that always stay.
        weights: the matrices of the model that the press reads.
        future: whether the press predicts the attention of coming tokens. Such a press assumes that it gets one hidden
            state for each token so far, and computes positions from the number of hidden states.
    """

    hidden: Literal["none", "last", "window", "many", "every"] = "none"
    stays: tuple[str, ...] = ()
    weights: tuple[LayerWeight, ...] = ()
    future: bool = False


PRESSES = {
    "CURPress": Facts(stays=("num_sinks",)),
    "CapPress": Facts(hidden="many", stays=("n_sink",), future=True),
    "CompactorPress": Facts(hidden="every", stays=("sink_size_start", "sink_size_end")),
    "CriticalKVPress": Facts(weights=("o_proj",)),
    "ExpectedAttentionPress": Facts(hidden="many", stays=("n_sink",), future=True),
    "KeyDiffPress": Facts(),
    "KnormPress": Facts(),
    "LagKVPress": Facts(stays=("n_sink",)),
    "LeverageScorePress": Facts(hidden="every"),
    "NonCausalAttnPress": Facts(hidden="every"),
    "PyramidKVPress": Facts(hidden="window", stays=("window_size",)),
    "RandomPress": Facts(),
    "SnapKVPress": Facts(hidden="window", stays=("window_size",)),
    "StreamingLLMPress": Facts(stays=("n_sink",)),
    "TOVAPress": Facts(hidden="last"),
}

REFUSED = {
    "ExpectedAttentionStatsPress": "it loads statistics of queries from the hub by the model's name; "
    "use kvpress:ExpectedAttentionPress",
    "KVzapPress": "it loads networks from the hub by the model's name; use kvzap",
    "ObservedAttentionPress": "it reads the attention of all queries to all keys, which the engine never holds; "
    "use h2o",
    "QFilterPress": "it loads filters from the hub by the model's name",
}
