"""Trains retention gates: `trimkv` with a budget per head, `retention` with one budget for all layers and heads.

The model is frozen. It reads each answer twice: with normal attention (the teacher), and with attention in which every
entry fades by its gate's beta instead of being evicted (the student). Gradients reach the gates of all layers.

    loss = (KL(teacher || student) + cross-entropy of the next token) / 2  +  `capacity` * capacity loss

The first term is a mean over the answer's tokens. The capacity loss (`kvbench.eviction.terms.capacity`) measures by how
much the entries of prompt and answer, each weighted by its decay beta^age, exceed the budget. The engine's own code
computes the gates. The sources are TRIM-KV (arXiv 2512.03324) and global retention (arXiv 2605.09649).

Letters: b sequences, T tokens, t predictions that are compared at a time, Hq query heads, Hk KV heads, D hidden size,
Dv size of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch.nn import functional as F

from kvbench import registry
from kvbench.engine.attention.geometry import LayerGeometry, check_equal_heads, check_evicts, for_lengths, homes
from kvbench.engine.attention.interface import AttentionCall, route
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import model_fields
from kvbench.engine.rules import Rules
from kvbench.errors import UserError
from kvbench.eviction.api import Method
from kvbench.eviction.terms.capacity import Hinge, capacity_loss
from kvbench.eviction.terms.gates import Gate, GateForm, Tie
from kvbench.eviction.terms.retention import Form, gated_attention
from kvbench.replay.comparison import Comparison
from kvbench.replay.reader import TraceReader
from kvbench.replay.reference import batches, read_full
from kvbench.train.forward import in_blocks
from kvbench.train.logits import by_blocks, final_states, logits_of
from kvbench.train.recipe import TRAIN_SHORTER, TraceRecipe, check_choices, check_least, with_gradient
from kvbench.train.sparse_masks import plain
from kvbench.train.sparse_pass import RECOMPUTE, recomputed, recomputes
from kvbench.train.traces import Trace

BLOCK = 512  # queries per attention call
MOST_TOKENS = 4096  # most tokens of a batch with one graph; larger batches are read trace by trace
CHOICES = {"gate": get_args(Gate), "tie": get_args(Tie), "form": get_args(Form), "hinge": get_args(Hinge)}


class GateRecipe(TraceRecipe):
    """The base class of the two recipes that train retention gates on traces. Held-out figures are means over
    answers."""

    figure = "kl"
    trained_at = ("budget",)  # the interval matters only for held-out figures
    over: ClassVar[Literal["head", "model"]]  # whether each head has the budget, or the whole model shares it

    def begin(self) -> None:
        more = self.settings.more
        self.longest = max(len(t.ids) for t in (*self.traces, *self.test))
        self.geometry = for_lengths(self.loaded.geometry, self.longest)
        check_evicts(self.geometry, self.longest, TRAIN_SHORTER)
        check_equal_heads(self.geometry)
        self.budget, self.interval = int(more["budget"]), int(more["interval"])
        self.again = recomputes(self.loaded.model, more["recompute"])
        form = GateForm(more["gate"], more["tie"], int(more["width"]))
        self.trained = _random_gates(form, self.loaded, float(more["bias"]), self.settings.seed)
        method = registry.methods.get(self.name)(horizon=int(more["horizon"]))
        self.rules = Rules(method=method, budget=None, interval=self.interval, weights=self.trained)

    @property
    def at_once(self) -> int | None:  # type: ignore[override]  # depends on the traces' length
        return None if self.settings.batch * self.longest <= MOST_TOKENS else 1

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        check_choices(more, **CHOICES, recompute=RECOMPUTE)
        check_least(more, width=1, budget=1, interval=1, horizon=1, capacity=0)
        recomputes(loaded.model, more["recompute"])

    def about_data(self) -> list[str]:
        if not self.settings.more["capacity"]:  # the user switched the capacity loss off
            return []
        short = sum(len(trace.ids) <= self.budget for trace in self.traces)
        if short == len(self.traces):
            raise UserError(
                f"every prompt with its answer fits into --opt budget={self.budget}, so the capacity loss is always 0 "
                "and no gate learns to forget. Give longer questions or texts, or a smaller --opt budget."
            )
        each = (
            f"{short} of {len(self.traces)} answers teach no gate to forget: with the prompt they fit into the budget."
        )
        return [each] if short else []

    def card(self) -> dict[str, Any]:
        return super().card() | {"layers": [g.index for g in self.geometry if g.evicts]}

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.trained

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        loss, kl, capacity = self._means(self.batch(step, share))
        return loss, {"kl": float(kl.detach()), "capacity": float(capacity.detach())}

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        _, soft, capacity = self._means(self.test)
        return {"kl": self._evicted(), "soft_kl": float(soft), "capacity": float(capacity)}

    def _means(self, traces: Sequence[Trace]) -> torch.Tensor:
        """Return three means over traces: of the loss, of KL(teacher || student) and of the capacity loss, [3]. Only
        the loss has gradients."""
        return torch.stack([self._sums(group) for group in alike(traces)]).sum(dim=0) / len(traces)

    def _sums(self, traces: Sequence[Trace]) -> torch.Tensor:
        """Return three sums over traces: of the loss, of KL(teacher || student) and of the capacity loss, [3]. All
        traces must have equally long prompts and answers."""
        model, n = self.loaded.model, len(traces[0].answer)
        ids = torch.tensor([t.ids for t in traces], device=self.loaded.device)
        student = Student(self.rules, self.geometry, self.settings.more["form"])
        # State i of the last n + 1 predicts token i of the answer; the last predicts no token of it and is cut.
        with torch.no_grad():
            wanted = final_states(model, plain, last=n + 1, input_ids=ids)[:, :-1]
        # The backward pass recomputes layers, so it must run while the attention is replaced.
        with recomputed(model, self.again), route(model, student, hidden=True):
            guessed = final_states(model, None, last=n + 1, input_ids=ids)[:, :-1]
            kl, ce = by_blocks(partial(_compared, model, ids[:, -n:]), guessed, wanted).mean(dim=1).sum(dim=0)
            log_beta = torch.stack(list(student.log_beta.values()), dim=1)  # [b, L, Hk, T]
            more = self.settings.more
            capacity = capacity_loss(log_beta, self.budget, over=self.over, hinge=more["hinge"]).sum()
            loss = (kl + ce) / 2 + float(more["capacity"]) * capacity
            loss = with_gradient(loss, self.trained.values()) if loss.requires_grad else loss
        return torch.stack([loss, kl.detach(), capacity.detach()])

    def _evicted(self) -> float:
        """Read the held-out answers while the method evicts with the current gates; return the figure `kl`."""
        full = self._reader(registry.methods.get("full")(), None)
        evicting = self._reader(_without_file(self.rules.method), self.budget)
        divergences: list[float] = []
        for group in batches([trace.forced() for trace in self.test], self.loaded, self.interval):
            comparison = Comparison(read_full(full, group), copies=1)
            evicting.read(group, comparison, self.trained)
            divergences += [float(figures.divergence.mean()) for figures in comparison.figures()]
        return sum(divergences) / len(divergences)

    def _reader(self, method: Method, budget: int | None) -> TraceReader:
        return TraceReader(self.loaded, method, budget=budget, interval=self.interval, max_tokens=self.longest)


class TrimKVRecipe(GateRecipe):
    """Trains the retention gates of `trimkv`, in which every head has the same budget."""

    name = kind = "trimkv"
    over = "head"


class RetentionRecipe(GateRecipe):
    """Trains the retention gates of `retention`, in which all layers and heads share one budget."""

    name = kind = "retention"
    over = "model"


class Student:
    """Computes the student's attention, in which entries fade by their gates (`fading`).

    `log_beta` has the logarithm of every entry's beta, [b, Hk, T], for each layer from which methods evict entries.
    """

    def __init__(self, rules: Rules, geometry: Sequence[LayerGeometry], form: Form) -> None:
        self.rules, self.geometry, self.form = rules, {g.index: g for g in geometry}, form
        self.homes = homes(geometry)
        self.log_beta: dict[int, torch.Tensor] = {}

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        home = self.homes[call.layer]
        if not self.geometry[home].evicts:
            return plain(call)
        if home != call.layer:  # the entries of an earlier layer, which fade by its gates
            return fading(call, self.log_beta[home], self.form)
        log_beta = self.rules.columns_of_new_tokens(self.geometry[home], call)["log_beta"]
        self.log_beta.setdefault(home, log_beta)  # keep the first: the backward pass may recompute the layer
        return fading(call, log_beta, self.form)


def fading(call: AttentionCall, log_beta: torch.Tensor, form: Form) -> torch.Tensor:
    """Return the output [b, T, Hq, Dv] of attention in which an entry of age a fades by beta^a. log_beta: the logarithm
    of every entry's beta, [b, Hk, T]. form: to what beta^a is applied (`gated_attention`)."""

    def attend_block(first: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scale: dict[str, Any] = {"scaling": call.scaling, "softcap": call.softcap, "sinks": call.sinks}
        beta = log_beta[..., : key.shape[2]]
        return gated_attention(query, key, value, beta, form=form, first=first, **scale).transpose(1, 2)

    return in_blocks(call, attend_block, BLOCK)


def _compared(
    model: Any, targets: torch.Tensor, first: int, guessed: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Return, for each of t predictions, KL(teacher || student) and the student's cross-entropy, [b, t, 2].

    targets: all tokens to predict; the t predictions are for those from index `first` on. guessed, wanted: the hidden
    states [b, t, D] from which student and teacher make the t predictions.
    """
    with torch.no_grad():
        teacher = logits_of(model, wanted).log_softmax(dim=-1)
    guess = logits_of(model, guessed).log_softmax(dim=-1)
    kl = F.kl_div(guess, teacher, reduction="none", log_target=True).sum(dim=-1)
    ce = -guess.gather(-1, targets[:, first : first + guess.shape[1], None])[..., 0]
    return torch.stack([kl, ce], dim=-1)


def _without_file(method: Method) -> Method:
    """Return a copy of the method that needs no weights file: each reading passes the current gates to it instead."""
    cls = type(method)
    return type(cls.__name__, (cls,), {"weights": lambda self: None})(**method.options())


def alike(traces: Sequence[Trace]) -> Iterator[list[Trace]]:
    """Yield groups of traces with equally long prompts and equally long answers. A group has at most `MOST_TOKENS`
    tokens, unless a single trace has more."""
    groups: dict[tuple[int, int], list[Trace]] = {}
    for trace in traces:
        groups.setdefault((len(trace.prompt), len(trace.answer)), []).append(trace)
    for group in groups.values():
        size = max(1, MOST_TOKENS // len(group[0].ids))
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _random_gates(form: GateForm, loaded: LoadedModel, bias: float, seed: int) -> dict[str, torch.Tensor]:
    """Return random gates. bias: the bias of their last projection; with a large bias, entries hardly fade. Other
    biases are 0, and weights are drawn from N(0, 1 / inputs)."""
    generator = torch.Generator().manual_seed(seed)
    gates = {}
    for name, shape in form.shapes(model_fields(loaded.model.config)).items():
        if name == "out.bias":
            tensor = torch.full(shape, bias)
        elif name.endswith(".bias"):
            tensor = torch.zeros(shape)
        else:
            tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        gates[name] = tensor.to(loaded.device).requires_grad_(True)
    return gates
