"""Scripts that call Triton kernels run in their own processes: a kernel's definition chooses the interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.folders import ROOT

HERE = Path(__file__).parent
TOOLS = ROOT / "tests" / "tools"


@pytest.fixture(scope="session")
def script() -> Callable[..., list[dict[str, Any]]]:
    """script("decode_cases.py", "200", interpret=True): what the script printed, one JSON object per line."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")

    def run(name: str, *argv: str, interpret: bool) -> list[dict[str, Any]]:
        if interpret and torch.cuda.is_available():
            pytest.skip("the test beside this one runs the kernels themselves on the GPU")
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "TRITON_DEFAULT_FP_FUSION": "1"}
        env |= {"TRITON_INTERPRET": "1"} if interpret else {}
        path = next(folder / name for folder in (HERE, TOOLS) if (folder / name).exists())
        command = [sys.executable, str(path), *argv]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run
