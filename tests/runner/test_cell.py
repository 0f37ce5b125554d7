"""What names a row beside the settings: tables, draft models, plug-in code; and options that came later."""

from __future__ import annotations

import pytest

from kvbench import tiny
from kvbench.config import plugins
from kvbench.errors import SetupError, UserError
from kvbench.eviction.choose import make
from kvbench.runner.cell import artefacts
from kvbench.sources import models

TINY = models.describe("tiny")
CONFIG = TINY.config


def test_a_table_is_named_by_its_hash(tmp_path):
    [(kind, digest)] = artefacts(make("headkv", {}), CONFIG, ["headkv"], TINY).items()
    assert (kind, len(digest)) == ("headkv", 16)
    for suffix in ("safetensors", "json"):
        (tmp_path / f"headkv.{suffix}").write_bytes((tiny.path() / f"headkv.{suffix}").read_bytes())
    table = str(tmp_path / "headkv.safetensors")
    assert artefacts(make("headkv", {"table": table}), CONFIG, ["headkv"], TINY) == {"headkv": digest}
    with (tmp_path / "headkv.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(SetupError):
        artefacts(make("headkv", {"table": table}), CONFIG, ["headkv"], TINY)


def test_a_missing_table_or_draft_is_an_error_before_any_work(tmp_path):
    with pytest.raises(SetupError, match="headkv"):
        artefacts(make("headkv", {"table": str(tmp_path / "none.safetensors")}), CONFIG, ["headkv"], TINY)
    with pytest.raises(UserError, match="draft"):
        artefacts(make("speckv", {}), CONFIG, ["speckv"], TINY)
    with pytest.raises(UserError, match="draft"):
        artefacts(make("ada-kv", {"base": "speckv"}), CONFIG, ["ada-kv"], TINY)


def test_drafts_and_plug_ins(tmp_path, monkeypatch):
    assert artefacts(make("speckv", {"draft": "tiny"}), CONFIG, ["speckv"], TINY) == {
        "draft tiny": models.revision(TINY)
    }
    assert artefacts(make("gkv", {}), CONFIG, ["gkv", "walk"], TINY) is None
    monkeypatch.setattr(plugins, "hash_of", lambda name, *kinds: "ab" * 32 if name == "mine" else None)
    assert artefacts(make("gkv", {}), CONFIG, ["mine", "walk"], TINY) == {"plug-in mine": "ab" * 8}


def test_a_table_beside_the_weights_is_no_part_of_the_model(tmp_path):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((tiny.path() / file).read_bytes())
    before = models.revision(models.describe(str(tmp_path)))
    for file in ("duo.json", "duo.safetensors"):
        (tmp_path / file).write_bytes((tiny.path() / file).read_bytes())
    assert models.revision(models.describe(str(tmp_path))) == before
