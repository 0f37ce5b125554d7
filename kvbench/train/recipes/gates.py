"""Training of retention gates: `trimkv`, every head on its own, and `retention`, all heads of all layers together.

The model is frozen. It reads its own answers twice: as it is (the teacher), and with every entry fading by its gate's
beta instead of being evicted (the student), through which gradients reach the gates of all layers.

    loss = (KL(teacher || student) + cross-entropy of the next token) / 2  +  `capacity` * capacity loss

TRIM-KV (arXiv 2512.03324), global retention (arXiv 2605.09649). The first term is a mean over the answer's tokens; the
second (`kvbench.eviction.terms.capacity`) grows with what is alive beyond the budget, at any token of prompt or
answer. Gates are called as the engine calls them when it evicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, get_args

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kvbench import registry
from kvbench.config.parsers import BadValue
from kvbench.config.run_config import MethodChoice
from kvbench.engine.attention.geometry import LayerGeometry, check_equal_heads, check_evicts, for_lengths
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import Base, model_fields, save_weights
from kvbench.engine.rules import Rules
from kvbench.errors import UserError, show
from kvbench.eviction.terms.capacity import Hinge, capacity_loss
from kvbench.eviction.terms.gates import Gate, GateForm, Tie
from kvbench.eviction.terms.retention import Form, gated_attention
from kvbench.replay.batches import replay
from kvbench.replay.choices import Chosen
from kvbench.train.forced import forced
from kvbench.train.forward import forward, plain
from kvbench.train.recipe import Recipe, Settings, drawing
from kvbench.train.traces import Trace

BLOCK = 512  # queries whose attention is computed together
MOST_TOKENS = 4096  # of a batch in one graph; longer traces are read one by one
CHOICES = {"gate": get_args(Gate), "tie": get_args(Tie), "form": get_args(Form), "hinge": get_args(Hinge)}


class GateRecipe(Recipe):
    """`settings.more`: gate, tie and width of the gates, their first bias, form of the student's attention, hinge and
    weight of the capacity loss, budget M; and the interval at which the held-out answers are evicted.

    Held out: `kl`, what eviction at the budget adds to every token of an answer, KL(full || evicted) as in `kvbench
    replay`; beside it the two parts of the loss, `soft_kl` and `capacity`. Each a mean over answers.
    """

    figure = "kl"
    over: ClassVar[Literal["head", "model"]]  # who shares a budget

    def __init__(
        self, loaded: LoadedModel, settings: Settings, traces: Sequence[Trace], held_out: Sequence[Trace]
    ) -> None:
        super().__init__(settings)
        more = settings.more
        self.check(loaded, more)
        self.loaded, self.traces, self.test = loaded, traces, held_out
        self.longest = max(len(t.ids) for t in (*traces, *held_out))
        self.geometry = for_lengths(loaded.geometry, self.longest)
        check_evicts(self.geometry, self.longest)
        check_equal_heads(self.geometry)
        self.budget = int(more["budget"])
        loaded.model.requires_grad_(False)
        form = GateForm(more["gate"], more["tie"], int(more["width"]))
        self.trained = _drawn(form, loaded, float(more["bias"]), settings.seed)
        method = registry.methods.get(self.name)()
        self.rules = Rules(method=method, budget=None, interval=int(more["interval"]), weights=self.trained)

    @property
    def at_once(self) -> int | None:  # type: ignore[override]  # here it follows the traces
        return None if self.settings.batch * self.longest <= MOST_TOKENS else 1

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        for option, known in CHOICES.items():
            if more[option] not in known:
                raise UserError(BadValue(" or ".join(known), show(more[option])).sentence(f"--opt {option}"))
        for option in ("width", "budget", "interval"):
            if int(more[option]) < 1:
                raise UserError(BadValue("at least 1", str(more[option])).sentence(f"--opt {option}"))
        if float(more["capacity"]) < 0:
            raise UserError(BadValue("at least 0", str(more["capacity"])).sentence("--opt capacity"))

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.trained

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        generator = drawing(self.settings.seed, step)
        order = torch.randint(0, len(self.traces), (self.settings.batch,), generator=generator).tolist()[share]
        kl, ce, capacity = self._means([self.traces[i] for i in order])
        figures = {"kl": float(kl.detach()), "capacity": float(capacity.detach())}
        return (kl + ce) / 2 + float(self.settings.more["capacity"]) * capacity, figures

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        soft, _, capacity = self._means(self.test)
        return {"kl": self._evicted(), "soft_kl": float(soft), "capacity": float(capacity)}

    def card(self) -> dict[str, Any]:
        return {"traces": len(self.traces), "held_out": len(self.test)}

    def _means(self, traces: Sequence[Trace]) -> tuple[torch.Tensor, ...]:
        """KL to the teacher, cross-entropy and capacity loss: means over traces."""
        parts = [torch.stack(self._losses(group)) for group in alike(traces)]  # each [3, traces]
        return tuple(torch.cat(parts, dim=1).mean(dim=1))

    def _losses(self, traces: Sequence[Trace]) -> tuple[torch.Tensor, ...]:
        """KL, cross-entropy and capacity loss [b] of traces whose prompts and answers are equally long."""
        model, n = self.loaded.model, len(traces[0].answer)
        ids = torch.tensor([t.ids for t in traces], device=self.loaded.device)
        student = Student(self.rules, self.geometry, self.settings.more["form"])
        # Row i of the newest n + 1 predicts token i of the answer; the last row predicts what follows it.
        with torch.no_grad():
            teacher = forward(model, plain, logits=n + 1, input_ids=ids)[:, :-1].float().log_softmax(dim=-1)
        guess = forward(model, student, logits=n + 1, hidden=True, input_ids=ids)[:, :-1].float().log_softmax(dim=-1)
        kl = F.kl_div(guess, teacher, reduction="none", log_target=True).sum(dim=-1)
        ce = -guess.gather(-1, ids[:, -n:, None])[..., 0]
        log_beta = torch.stack(student.log_beta, dim=1)  # [b, L, Hk, T]
        capacity = capacity_loss(log_beta, self.budget, over=self.over, hinge=self.settings.more["hinge"])
        return kl.mean(dim=-1), ce.mean(dim=-1), capacity

    def _evicted(self) -> float:
        """Mean over the held-out answers of KL(full || evicted) a token, with the gates as they are."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{self.kind}.safetensors"
            save_weights(path, self.kind, self.tensors(), Base(name="", config=self.loaded.model.config), made={})
            method = MethodChoice(name=self.name, options=(("gates", str(path)),))
            found = replay(
                self.loaded,
                "held out",
                [forced(t) for t in self.test],
                [Chosen(method=method, budget=self.budget)],
                interval=int(self.settings.more["interval"]),
                max_tokens=self.longest,
            )
        return sum(row["kl"] for row in found.traces) / len(found.traces)


class TrimKVRecipe(GateRecipe):
    """Gates of `trimkv`."""

    name = kind = "trimkv"
    over = "head"


class RetentionRecipe(GateRecipe):
    """Gates of `retention`."""

    name = kind = "retention"
    over = "model"


class Student:
    """Attention in which entries fade by their retention; `log_beta` [b, Hk, T] of each layer that evicts."""

    def __init__(self, rules: Rules, geometry: Sequence[LayerGeometry], form: Form) -> None:
        self.rules, self.geometry, self.form = rules, geometry, form
        self.log_beta: list[torch.Tensor] = []

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        columns = self.rules.columns_of_new_tokens(self.geometry[call.layer], call)
        if not columns:  # a layer with a sliding window
            return plain(call)
        self.log_beta.append(columns["log_beta"])
        return fading(call, columns["log_beta"], self.form)


def fading(call: AttentionCall, log_beta: torch.Tensor, form: Form, block: int = BLOCK) -> torch.Tensor:
    """[b, T, Hq, Dv] gated attention, `block` queries at a time: a gradient computes all but a single block once more,
    so that no T x T matrix is kept.
    """
    t = call.query.shape[2]

    def rows(first: int) -> torch.Tensor:
        end = min(first + block, t)
        return gated_attention(
            call.query[:, :, first:end],
            call.key[:, :, :end],
            call.value[:, :, :end],
            log_beta[..., :end],
            scaling=call.scaling,
            form=form,
            first=first,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    if t <= block:
        return rows(0).transpose(1, 2)
    parts = [checkpoint(rows, first, use_reentrant=False) for first in range(0, t, block)]
    return torch.cat(parts, dim=2).transpose(1, 2)


def alike(traces: Sequence[Trace]) -> Iterator[list[Trace]]:
    """Traces whose prompts and answers are equally long, as many together as `MOST_TOKENS` allows."""
    groups: dict[tuple[int, int], list[Trace]] = {}
    for trace in traces:
        groups.setdefault((len(trace.prompt), len(trace.answer)), []).append(trace)
    for group in groups.values():
        size = max(1, MOST_TOKENS // len(group[0].ids))
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _drawn(form: GateForm, loaded: LoadedModel, bias: float, seed: int) -> dict[str, torch.Tensor]:
    """Gates that hardly forget: a large last bias, and otherwise small weights, N(0, 1 / inputs), without biases."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, shape in form.shapes(model_fields(loaded.model.config)).items():
        if name == "out.bias":
            tensor = torch.full(shape, bias)
        elif name.endswith(".bias"):
            tensor = torch.zeros(shape)
        else:
            tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        drawn[name] = tensor.to(loaded.device).requires_grad_(True)
    return drawn
