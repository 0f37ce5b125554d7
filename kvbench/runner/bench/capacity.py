"""Computes how many sequences fit into memory, with the memory plan that a run makes before it starts."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.shape import shape_of_model
from kvbench.engine.plan import MOST_SLOTS, Machine, plan_cell
from kvbench.errors import SetupError
from kvbench.eviction.api import Method
from kvbench.eviction.budget import Budget
from kvbench.runner.bench.setting import Load, Setting


class Capacity:
    """Plans the memory of methods on one model.

    machine: limits of this machine. If `setting.memory` is given, the plans are for a GPU with that many bytes instead.
    """

    def __init__(self, setting: Setting, loaded: LoadedModel, machine: Machine) -> None:
        self.setting, self.dtype = setting, loaded.dtype
        self.shape = shape_of_model(loaded.model)
        self.device, self.machine = loaded.device, machine
        if setting.memory is not None:
            self.device, self.machine = torch.device("cuda"), replace(machine, memory=setting.memory)

    def fitting(self, method: Method, budget: Budget | None, load: Load) -> int:
        """Return how many sequences of this load fit into memory according to the plan; 0 if not even one fits. Raises
        UserError if the engine cannot serve the method on this model."""
        try:
            plan = plan_cell(
                self.shape,
                self.machine,
                method,
                budget=budget,
                interval=self.setting.interval,
                sequences=1,
                max_tokens=load.prompt + load.new_tokens,
                max_output=load.new_tokens,
                max_prompt=load.prompt,
                slots="auto",
                device=self.device,
                dtype=self.dtype,
                backend=self.setting.decode_attn,
            )
        except SetupError:  # not even one
            return 0
        return plan.fitting

    def first(self, fitting: int, load: Load) -> int:
        """Return the number of sequences with which a measurement begins. fitting: the number that `fitting` returned.

        If the user gave no number of sequences, the result is `fitting`, but at most MOST_SLOTS. If the user gave a
        number and a memory size, the result is the smaller of that number and `fitting`. If the user gave only a
        number, the result is that number; the measurement then tries fewer sequences if memory runs out.
        """
        if load.sequences is None:
            return min(fitting, MOST_SLOTS[self.device.type])
        return load.sequences if self.setting.memory is None else min(load.sequences, fitting)
