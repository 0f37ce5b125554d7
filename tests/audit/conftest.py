from __future__ import annotations

import pytest
import torch

from kvbench.audit.invariants.subject import Subject, random_subject


@pytest.fixture(scope="module")
def mqa(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    torch.set_num_threads(1)
    return random_subject("mqa", tmp_path_factory.mktemp("audit"))
