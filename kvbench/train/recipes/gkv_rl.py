"""`gkv-rl`: the model learns from rewards for answers that it generates with an evicted cache ("RL-Sparse").

In a step, the model with its current weights samples G answers to each of B questions under eviction. The step raises

    J    = mean over questions of 1/G sum_i 1/|o_i| sum_t rho_it A_i
    rho  = exp(log p - log p without gradient) = 1
    A_i  = (r_i - mean r) / std r                   over the G answers of a question

(G-KV, arXiv 2512.00504; GRPO without a KL term, one update per step). o_i is answer i; r is 1 for a right answer and 0
for others. p is the probability of the sampled token at the sampling temperature, under masks that reproduce the
evictions. A truncated answer has A = 0, as in the paper; the released code sets only a negative A to 0.

The held-out figures are the mean reward of G sampled answers per question, which training maximises, and the accuracies
of greedy answers. With a method that does not evict, such as `full`, the masks hide nothing; this is the paper's
baseline "RL-Full".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvbench.engine.model.load import LoadedModel
from kvbench.engine.rules import KeptLog
from kvbench.eviction import noise
from kvbench.records import Generation, Sampling
from kvbench.train import generation_memory
from kvbench.train.gkv import SparseRecipe
from kvbench.train.logits import by_blocks, logits_of
from kvbench.train.recipe import Figure, Settings
from kvbench.train.sparse_pass import Answered, Part, add_up
from kvbench.train.traces import Question

EPSILON = 1e-6  # against a standard deviation of 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A sampled answer with its reward.

    cut: True if the answer failed, or reached the length limit without an end token.
    """

    answered: Answered
    reward: float
    cut: bool


class RLRecipe(SparseRecipe):
    """Trains the model by group-relative policy optimisation on answers that it generates under eviction.

    The option `group` is the number of answers to each question; `settings.batch` counts questions.
    """

    name, figure = "gkv-rl", "reward"

    def __init__(
        self, loaded: LoadedModel, settings: Settings, questions: Sequence[Question], test: Sequence[Question]
    ) -> None:
        super().__init__(loaded, settings, test)
        self.questions, self.group = questions, int(settings.more["group"])
        self.check_longest(loaded, settings.more, max(len(q.ids) + q.max_new_tokens for q in questions))

    def about_data(self) -> list[str]:
        if self.budget is None:
            return []
        texts = [(len(q.ids), len(q.ids) + q.max_new_tokens) for q in self.questions]
        whole = self.fitting(texts, "prompt with its longest answer")
        each = (
            f"{whole} of {len(texts)} questions train without eviction: the prompt with its longest answer fits into "
            "the budget."
        )
        return [each] if whole else []

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, Figure]]:
        rollouts = self.sample(step, share)  # [B][G]
        rewards = torch.tensor([[r.reward for r in group] for group in rollouts])
        cut = torch.tensor([[r.cut for r in group] for group in rollouts])
        learnt = []
        for group, row in zip(rollouts, (advantages(rewards, cut) / rewards.numel()).tolist()):
            for rollout, advantage in zip(group, row):
                answered = rollout.answered
                if advantage:  # an answer with advantage 0 has no gradient
                    learnt.append(replace(answered, weight=advantage / len(answered.answer)))
        loss = add_up(self.loaded.model, learnt, self.lifetimes, self._objective, micro=self.micro, again=self.again)
        lengths = [len(r.answered.answer) for group in rollouts for r in group]
        figures: dict[str, Figure] = {
            "reward": float(rewards.mean()),
            "cut": float(cut.float().mean()),
            # share of questions whose answers have different rewards
            "mixed": float((rewards.std(dim=1, correction=0) > 0).float().mean()),
            "tokens": sum(lengths) / len(lengths),
            "entropy": self._entropy([r.answered for group in rollouts for r in group]),
        }
        return loss, figures

    def rehearse_loss(self, share: slice) -> torch.Tensor:
        """Compute the loss of two micro-batches in a rehearsal: answers of the greatest length to one question.

        If the method has a budget, first record one made-up eviction for each answer of this process in a step: only
        the sizes of its tensors count. share: the questions of a step that this process answers.
        """
        own = self.questions[share.start] if share.start < len(self.questions) else self.questions[0]
        if self.budget is not None:
            copies = self.method.per_query_head
            layers = {g.index: g.query_heads if copies else g.kv_heads for g in self.loaded.geometry if g.evicts}
            longest, device = len(own.ids) + own.max_new_tokens, self.loaded.device
            for key in range((share.stop - share.start) * self.group):
                for layer, heads in layers.items():
                    self.lifetimes(
                        key, longest, layer, [torch.zeros(self.budget, dtype=torch.int64, device=device)] * heads
                    )
        answer = own.ids[:1] * own.max_new_tokens
        answers = [Answered(prompt=own.ids, answer=answer, keys=(i, i)) for i in range(2 * self.micro)]
        loss = add_up(self.loaded.model, answers, self.lifetimes, self._objective, micro=self.micro, again=self.again)
        self._entropy(answers)
        return loss

    def generations(self) -> Sequence[generation_memory.Generation]:
        sampled, *greedy = super().generations()
        return (replace(sampled, sampling=Sampling(temperature=self.temperature)), *greedy)

    def card(self) -> dict[str, Any]:
        return super().card() | {"questions": len(self.questions)}

    def held_out(self) -> dict[str, float]:
        """Return the mean reward of sampled answers to held-out questions, and the accuracies of greedy answers."""
        groups = self._answers(self.test, -1)
        rewards = [rollout.reward for group in groups for rollout in group]
        return {"reward": sum(rewards) / len(rewards)} | super().held_out()

    def sample(self, step: int, share: slice) -> list[list[Rollout]]:
        """Sample G answers to each question in `share` of a step's batch. Afterwards `lifetimes` holds the evictions of
        these answers only."""
        self.lifetimes.clear()
        drawn = self.draw(self.questions, step)[share]
        return self._answers(drawn, step, share.start, self.lifetimes)

    def _answers(
        self, questions: Sequence[Question], number: int, first: int = 0, log: KeptLog | None = None
    ) -> list[list[Rollout]]:
        """Sample G answers to each question. The sampling noise depends on `number` and on each question's index,
        counted from `first`."""
        asked = {str(first + index): question for index, question in enumerate(questions)}
        sampling = Sampling(temperature=self.temperature)
        seed = self.settings.seed * 1_000_003 + number
        requests = [q.request(name, self.group, sampling, seed) for name, q in asked.items()]
        engine = self.engine(questions, self.method, self.budget, self.group, log)
        answers = {(g.request.doc_id, g.sample): g for g in engine.generate(requests)}
        return [[_judged(q, answers[name, sample]) for sample in range(self.group)] for name, q in asked.items()]

    @torch.no_grad()
    def _entropy(self, answered: Sequence[Answered]) -> tuple[float, float]:
        """Return the sum of the entropies, in nats, of the distributions from which the tokens of the answers were
        sampled, and the number of tokens."""
        total, tokens = 0.0, 0
        answered = [one for one in answered if one.answer]  # an answer whose first logits were NaN has no token
        for start in range(0, len(answered), self.micro):
            part = Part(answered[start : start + self.micro], self.loaded.device)
            states = part.states(self.loaded.model, part.tables(self.lifetimes))
            drawn = by_blocks(self._entropies, states)[part.weights > 0]
            total, tokens = total + float(drawn.sum()), tokens + len(drawn)
        return total, tokens

    def _entropies(self, first: int, states: torch.Tensor) -> torch.Tensor:
        return entropies(logits_of(self.loaded.model, states), self.temperature)

    def _objective(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        sampled = log_probs(logits, targets, self.temperature)
        return -(sampled - sampled.detach()).exp()


def log_probs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probabilities of the tokens `targets`, [b, n] for b answers of n tokens. logits: the logits from
    which the tokens were sampled, [b, n, vocabulary]. temperature: the sampling temperature."""
    return (logits / temperature).log_softmax(dim=-1).gather(-1, targets[..., None])[..., 0]


def entropies(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the entropies, in nats, of the sampling distributions, [b, n] for b answers of n tokens. logits: [b, n,
    vocabulary]. temperature: the sampling temperature."""
    return torch.distributions.Categorical(logits=logits / temperature, validate_args=False).entropy()


def advantages(rewards: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """Return the advantages A [B, G] of G answers to each of B questions, from their rewards [B, G]. A is 0 for
    truncated answers (`cut`), and where all rewards of a question are equal."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    spread = rewards.std(dim=1, correction=0, keepdim=True)
    return (centred / spread.clamp_min(EPSILON)).masked_fill(cut, 0.0)


def _judged(question: Question, answer: Generation) -> Rollout:
    request = answer.request
    keys = noise.signed64(request.noise_key(-1)), noise.signed64(request.noise_key(answer.sample))
    return Rollout(
        answered=Answered(prompt=tuple(request.prompt_ids), answer=answer.token_ids, keys=keys),
        reward=float(question.is_right(answer.text)),
        cut=answer.stop_reason == "length" or answer.status != "ok",
    )
