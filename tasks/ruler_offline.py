"""The six subtasks of RULER that need no download, with the prompts, scores and lengths of the task `ruler`.

Exception: at 64K and 128K, `cwe` needs more words than wonderwords has and downloads NVIDIA's longer word list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvbench.tasks.ruler import Ruler

from kvbench.registry import tasks
from kvbench.taskkit.ruler.recipes import OFFLINE


@tasks.register("ruler_offline", aliases=("ruler-offline",))
class RulerOffline(Ruler):
    summary = "the six subtasks of RULER that need no download"
    variants = OFFLINE
    averages: ClassVar[Mapping[str, Mapping[str, float]]] = {"mean of 6": dict.fromkeys(OFFLINE, 1.0)}
