"""The training of the built-in model: its steps and its checkpoints.

Muon trains the matrices; AdamW trains the head, the norms and the embedding. Seed, step and ladder (the tasks' levels)
determine data and learning rates. A checkpoint holds these three, the weights and the optimisers' states. So a
restored training gives the same model as an uninterrupted one on the same machine.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3ForCausalLM

from kvbench.errors import UserError
from kvbench.store.files import replacing
from kvbench.taskkit.synthetic.problem import KINDS
from kvbench.train.tiny.data import BATCH_TOKENS, STAGES, WEIGHTS, Batch, Ladder, Stage, draw_batch
from kvbench.train.tiny.warmstart import warm_start

WARMUP = 50  # steps
DECAY_FROM, FLOOR = 0.1, 0.02  # rates fall linearly after this share of the last stage, down to this share of the peak
ADAM_LR, EMBED_LR = 3e-3, 18e-3
WEIGHT = torch.tensor([WEIGHTS[kind] for kind in KINDS])


class Trainer:
    """A training of the built-in model: the model, its optimisers, the tasks' levels (`ladder`) and the step count."""

    def __init__(self, seed: int, scale: float = 1.0, batch_tokens: int = BATCH_TOKENS) -> None:
        self.seed, self.scale, self.batch_tokens = seed, scale, batch_tokens
        self.lengths = [max(1, round(stage.steps * scale)) for stage in STAGES]
        self.total = sum(self.lengths)
        self.model = warm_start(seed)
        self.ladder = Ladder()
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.climbs: list[dict[str, Any]] = []  # when each task reached each level
        matrices = [w for name, w in self.model.named_parameters() if w.ndim == 2 and ".layers." in name]
        head_and_norms = [w for w in self.model.parameters() if w.ndim == 1] + [self.model.lm_head.weight]
        embedding = [self.model.model.embed_tokens.weight]
        self.clipped = head_and_norms + embedding  # only AdamW's: Muon's step does not depend on the gradient's norm
        # Muon scales its rate by sqrt(max(1, rows / columns)) of a matrix. The model has its projections in separate
        # matrices, so none has to be split for Muon.
        self.muon = torch.optim.Muon(matrices, momentum=0.95, nesterov=True, ns_steps=5, weight_decay=0.02)
        groups = [{"params": head_and_norms, "peak": ADAM_LR}, {"params": embedding, "peak": EMBED_LR}]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    def stage(self) -> tuple[Stage, float]:
        """Return the stage to which the current step belongs, and the share of this stage's steps that are done. Raises
        IndexError after the last step of the training."""
        left = self.step
        for stage, length in zip(STAGES, self.lengths, strict=True):
            if left < length:
                return stage, left / length
            left -= length
        raise IndexError(f"step {self.step} is beyond the last step of the training")

    def train_step(self) -> dict[str, Any]:
        stage, done = self.stage()
        self._set_rates(stage, done)
        batch = draw_batch(self.seed, self.step, stage, self.ladder, self.batch_tokens)
        loss, right = batch_loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.clipped, 1.0)
        self.muon.step()
        self.adam.step()
        self.model.zero_grad(set_to_none=True)

        self.step += 1
        self.tokens += batch.tokens.size
        if self.ladder.learn(batch, right):
            level = self.ladder.level[batch.task]
            self.climbs.append({"step": self.step, "tokens": self.tokens, "task": batch.task, "level": level})
        row = {"step": self.step, "stage": stage.name, "task": batch.task, "level": batch.level}
        return row | {"tokens": batch.tokens.size, "loss": loss.item(), "right": right}

    def _set_rates(self, stage: Stage, done: float) -> None:
        pace = min(1.0, (self.step + 1) / WARMUP)
        if stage is STAGES[-1] and done > DECAY_FROM:
            pace = FLOOR + (1 - FLOOR) * (1 - done) / (1 - DECAY_FROM)
        for group in self.muon.param_groups:
            group["lr"] = pace * stage.muon_lr
        for group in self.adam.param_groups:
            group["lr"] = pace * group["peak"]

    def recipe(self) -> dict[str, Any]:
        """Return the settings of this training; a training continues only from a checkpoint with equal settings."""
        return {
            "seed": self.seed,
            "steps_scale": self.scale,
            "batch_tokens": self.batch_tokens,
            "stages": [asdict(stage) for stage in STAGES],
            "loss_weights": WEIGHTS,
            "muon": {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.02},
            "adamw": {"lr": ADAM_LR, "lr_embedding": EMBED_LR, "betas": [0.9, 0.98], "weight_decay": 0.0, "clip": 1.0},
            "schedule": {"warmup_steps": WARMUP, "decay_from": DECAY_FROM, "floor": FLOOR},
        }

    def save(self, path: Path) -> None:
        state = {name: getattr(self, name) for name in ("step", "tokens", "seconds", "climbs")}
        state |= {name: getattr(self, name).state_dict() for name in ("model", "muon", "adam")}
        state |= {"ladder": asdict(self.ladder), "recipe": self.recipe()}
        with replacing(path) as file:
            torch.save(state, file)

    def restore(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        if state["recipe"] != self.recipe():
            raise UserError(f"{path} belongs to a training with other settings or another seed; choose another --out.")
        for name in ("model", "muon", "adam"):
            getattr(self, name).load_state_dict(state[name])
        for name in ("step", "tokens", "seconds", "climbs"):
            setattr(self, name, state[name])
        self.ladder = Ladder(**state["ladder"])


def batch_loss(model: Qwen3ForCausalLM, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the weighted cross-entropy of the problems' solutions, and the share of right tokens by kind of token.
    Every token is predicted after the right earlier ones (teacher forcing)."""
    tokens = torch.from_numpy(batch.tokens)  # [problems, prompt + solution]
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, batch.n_prompt - 1 :])  # [problems, solution, 512]: the prompt needs no logits
    target = tokens[:, batch.n_prompt :]
    kinds = torch.from_numpy(batch.kinds)  # [solution]
    weight = WEIGHT[kinds]
    losses = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    loss = (losses * weight).mean() / weight.mean()
    hits = (logits.argmax(-1) == target).float().mean(0)  # [solution]
    return loss, {KINDS[k]: hits[kinds == k].mean().item() for k in np.unique(batch.kinds)}
