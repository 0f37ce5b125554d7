"""`gkv-rl`: the model learns from the rewards of answers that it wrote with an evicted cache ("RL-sparse").

A step asks B questions G times each, with the current weights and evictions, and maximises

    J = 1/G sum_i 1/|o_i| sum_t rho_it A_i       rho = exp(log p - log p without gradient) = 1,   a mean over questions
    A_i = (r_i - mean r) / std r                 over the G answers of a question

where r is 1 for a right answer and 0 for others, and log p is that of the sampled token under the masks that the
evictions left, at the temperature of sampling (G-KV, arXiv 2512.00504; GRPO without a KL term, one update a step). An
answer that was cut off at its longest length has A = 0, as in the paper; the released code only lifts it to 0 or more.
Held out is what J raises, the reward of G sampled answers to each question, and beside it what greedy ones are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.engine.model.load import LoadedModel
from kvbench.engine.rules import KeptLog
from kvbench.eviction import noise
from kvbench.records import Generation, Sampling
from kvbench.train.gkv import SparseRecipe, request
from kvbench.train.recipe import Settings
from kvbench.train.sparse_masks import Lifetimes
from kvbench.train.sparse_pass import Answered, Part, add_up
from kvbench.train.traces import Question

EPSILON = 1e-6  # against a standard deviation of 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled answer. cut: it was stopped at its longest length."""

    answered: Answered
    reward: float
    cut: bool


class RLRecipe(SparseRecipe):
    """Group-relative policy optimisation under eviction; more of `settings.more`: group, the answers to a question.

    `settings.batch` counts questions.
    """

    name, figure = "gkv-rl", "reward"

    def __init__(
        self, loaded: LoadedModel, settings: Settings, questions: Sequence[Question], test: Sequence[Question]
    ) -> None:
        super().__init__(loaded, settings, test)
        self.check_judged(questions)
        self.questions, self.group = questions, int(settings.more["group"])
        self.lifetimes = Lifetimes()

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        rollouts = self.sample(step, share)  # [B][G]
        rewards = torch.tensor([[r.reward for r in group] for group in rollouts])
        cut = torch.tensor([[r.cut for r in group] for group in rollouts])
        learnt = []
        for group, row in zip(rollouts, (advantages(rewards, cut) / rewards.numel()).tolist()):
            for rollout, advantage in zip(group, row):
                o = rollout.answered
                if advantage:  # others have no gradient
                    weight = advantage / len(o.answer)
                    learnt.append(Answered(prompt=o.prompt, answer=o.answer, keys=o.keys, weight=weight))
        loss = add_up(self.loaded.model, learnt, self.lifetimes, self._objective, micro=self.micro, again=self.again)
        lengths = [len(r.answered.answer) for group in rollouts for r in group]
        figures = {
            "reward": float(rewards.mean()),
            "cut": float(cut.float().mean()),
            "mixed": float((rewards.std(dim=1, correction=0) > 0).float().mean()),  # questions to learn from
            "tokens": sum(lengths) / len(lengths),
        }
        return loss, figures

    def card(self) -> dict[str, Any]:
        return super().card() | {"questions": len(self.questions)}

    def held_out(self) -> dict[str, float]:
        """Mean reward of answers that are sampled as in training, and what `SparseRecipe` holds out."""
        groups = self._answers(self.test, -1)
        rewards = [rollout.reward for group in groups for rollout in group]
        return {"reward": sum(rewards) / len(rewards)} | super().held_out()

    def sample(self, step: int, share: slice) -> list[list[Rollout]]:
        """G answers to each of a step's questions; `lifetimes` then knows what the cache held."""
        self.lifetimes.clear()
        drawn = self.drawn(step, len(self.questions))[share]
        return self._answers([self.questions[place] for place in drawn], step, share.start, self.lifetimes)

    def _answers(
        self, questions: Sequence[Question], number: int, first: int = 0, log: KeptLog | None = None
    ) -> list[list[Rollout]]:
        """G sampled answers to each question. Their noise follows from `number` and the places from `first` on."""
        asked = {str(first + place): question for place, question in enumerate(questions)}
        sampling = Sampling(temperature=self.temperature)
        seed = self.settings.seed * 1_000_003 + number
        requests = [request(q, place, self.group, sampling, seed) for place, q in asked.items()]
        engine = self.engine(questions, self.method, self.budget, self.group, log)
        found = {(g.request.doc_id, g.sample): g for g in engine.generate(requests)}
        return [[_judged(asked[place], found[place, sample]) for sample in range(self.group)] for place in asked]

    def _objective(self, logits: torch.Tensor, part: Part) -> torch.Tensor:
        said = log_probs(logits, part.targets, self.temperature)
        ratio = (said - said.detach()).exp()
        return -(ratio * part.weights).sum()


def log_probs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Of sampled tokens [b, n], from logits [b, n, V]."""
    return (logits / temperature).log_softmax(dim=-1).gather(-1, targets[..., None])[..., 0]


def advantages(rewards: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """A [B, G] of the answers to each question; 0 for those that were cut, and where all have one reward."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    spread = rewards.std(dim=1, correction=0, keepdim=True)
    return (centred / spread.clamp_min(EPSILON)).masked_fill(cut, 0.0)


def _judged(question: Question, answer: Generation) -> Rollout:
    assert question.right is not None
    asked = answer.request
    keys = noise.signed64(asked.noise_key(-1)), noise.signed64(asked.noise_key(answer.sample))
    return Rollout(
        answered=Answered(prompt=asked.prompt_ids, answer=answer.token_ids, keys=keys),
        reward=float(question.right(answer.text)),
        cut=answer.stop_reason == "length" or answer.status != "ok",
    )
