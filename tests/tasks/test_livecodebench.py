"""The task: variants, documents, prompts, and how answers become scores."""

from __future__ import annotations

import pickle

import pytest
from kvbench.tasks import livecodebench
from support.folders import DATA

from kvbench.errors import SetupError
from kvbench.scoring.pool import ScorePool
from kvbench.scoring.sandbox import Sandbox, choose
from kvbench.scoring.sandbox.tiers import Bwrap, Landlock
from kvbench.sources.data import Data
from kvbench.task import Doc, Output, Score, Task
from kvbench.taskkit.names import expand, get_task

TASK_DATA = DATA / "tasks"
RIGHT = {
    "kvb_001": "n = int(input())\nprint(sum(map(int, input().split())))",
    "kvb_004": (
        "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n"
        "        for j in range(len(nums)):\n            for i in range(j):\n"
        "                if nums[i] + nums[j] == target: return (i, j)\n        return []"
    ),
}


def docs(name: str = "livecodebench", style: str = "default") -> dict[str, Doc]:
    return {doc.doc_id: doc for doc in get_task(name).docs(Data(TASK_DATA), style=style)}


def out(text: str, thinking: bool = True) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=thinking)


def answer(program: str) -> Output:
    return out(f"<think>\n```python\ndraft\n```\n</think>\nHere:\n```python\n{program}\n```\n")


@pytest.fixture(scope="module")
def task() -> Task:
    return get_task("livecodebench")


def test_variants_and_their_files() -> None:
    rows = {name: get_task(f"livecodebench/{name}").size() for name in livecodebench.LiveCodeBench.variants}
    releases = [rows[f"release_v{n}"] for n in range(1, 7)]
    assert releases == [400, 511, 612, 713, 880, 1055]
    assert [rows[f"v{n}"] for n in range(1, 7)] == [400, 111, 101, 101, 167, 175]
    assert (rows["v4_v5"], rows["v1_v6"], rows["v5_v6"]) == (268, 1055, 342)
    assert len(rows) == 6 + 6 + 15
    manifest = get_task("lcb/v4_v5").manifest
    assert manifest is not None
    assert manifest.files == ("test4.jsonl", "test5.jsonl")
    assert get_task("livecodebench/v1").manifest == get_task("livecodebench/release_v1").manifest
    assert expand("livecodebench") == ["livecodebench"]
    assert get_task("livecodebench").size() == 1055


def test_documents() -> None:
    found = docs()
    assert list(found) == [f"kvb_{n:03d}" for n in range(1, 7)]
    assert found["kvb_003"].meta == {"category": "medium/codeforces", "contest_date": 20240810, "errata": False}
    assert found["kvb_004"].reference["function"] == "twoSum"
    assert found["kvb_001"].reference["function"] is None


def test_errata_are_flagged_by_id_and_by_title() -> None:
    row = {
        "question_id": "abc350_c",
        "question_title": "C",
        "metadata": "{}",
        "starter_code": "",
        "question_content": "?",
    }
    row |= {"public_test_cases": "[]", "private_test_cases": "[]", "difficulty": "easy", "platform": "atcoder"}
    row |= {"contest_date": "2024-04-20T00:00:00"}
    constants = dict.fromkeys(("FORMATTING_WITHOUT_STARTER_CODE", "SYSTEM_MESSAGE_GENERIC"), "")
    assert livecodebench._doc(row, "default", constants).meta["errata"]
    named = row | {"question_id": "3100", "question_title": "find-the-peaks"}
    assert livecodebench._doc(named, "default", constants).meta["errata"]
    assert not livecodebench._doc(named | {"question_title": "other"}, "default", constants).meta["errata"]
    assert len(livecodebench.ERRATA) == 17
    assert {"abc343_a", "arc185_c", "arc189_a"} < livecodebench.ERRATA


def test_prompts() -> None:
    turn = docs()["kvb_001"].turns[0]
    assert turn.system is None
    assert turn.user.startswith(
        "You will be given a question (problem specification) and will generate a correct Python program that matches "
        "the specification and passes all tests.\n\nQuestion: Read N and N integers."
    )
    assert turn.user.endswith("writes output to STDOUT.\n```python\n# YOUR CODE HERE\n```\n\n")
    starter = docs()["kvb_004"].turns[0].user
    assert "You will use the following starter code" in starter
    code = "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        "
    assert starter.endswith(f"```python\n{code}\n```\n\n")
    generic = docs(style="lcb_generic")["kvb_001"].turns[0]
    assert (generic.system or "").startswith("You are an expert Python programmer.")
    assert generic.user.startswith("### Question:\nRead N")
    assert "\n\n### Format: Read the inputs from stdin" in generic.user
    assert generic.user.endswith("```\n\n### Answer: (use the provided format with backticks)\n\n")
    gkv = docs(style="gkv")["kvb_001"].turns[0]
    assert gkv.user == turn.user
    assert (gkv.system or "").startswith("A conversation between User and Assistant.")
    assert "｜" not in (gkv.system or "")


def test_right_and_wrong_programs(task: Task) -> None:
    found = docs()
    for name, program in RIGHT.items():
        score = task.score(found[name], answer(program))
        assert (score.value, score.aux["official"], score.aux["no_program"]) == (1.0, 1.0, 0.0)
        assert score.facts["verdict"] == "pass"
        assert score.facts["passed_lcb"] is score.facts["passed_native"] is True
        assert score.facts["sandbox_tier"] in ("bwrap", "landlock")
        assert len(str(score.facts["sandbox_selftest"])) == 12
        assert str(score.facts["python_version"]).startswith("3.")
        assert score.extracted == program
    score = task.score(found["kvb_001"], answer("print(0)"))
    assert (score.value, score.facts["verdict"], score.aux["failed_test"]) == (0.0, "wrong_answer", 0.0)
    assert score.aux["contest_date"] == 20230507.0
    hostile = task.score(found["kvb_001"], answer("raise ValueError('\\x1b[2J')"))
    assert "\x1b" not in hostile.note
    assert hostile.facts["verdict"] == "runtime_error"


def test_a_program_within_unfinished_thinking_is_none(task: Task) -> None:
    text = f"<think>\n```python\n{RIGHT['kvb_001']}\n```\nbut wait"
    score = task.score(docs()["kvb_001"], out(text))
    assert (score.value, score.extracted, score.aux["no_program"], score.aux["official"]) == (0.0, None, 1.0, 1.0)
    assert score.facts["passed_lcb"] is False


def test_the_verdicts_may_differ(task: Task) -> None:
    program = "import sys\nfor line in sys.stdin:\n    last = line\nprint(sum(map(int, last.split())))"
    score = task.score(docs()["kvb_001"], answer(program))
    assert (score.value, score.facts["passed_native"]) == (0.0, True)


class TestNoSandbox:
    """A sandbox that is missing or breaks is never a wrong answer."""

    def test_none_works(self, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(unsafe: bool) -> Sandbox:
            raise SetupError("no sandbox works here")

        monkeypatch.setattr(livecodebench, "choose", refuse)
        score = task.score(docs()["kvb_001"], answer(RIGHT["kvb_001"]))
        assert (score.value, score.status, score.note) == (None, "sandbox_error", "no sandbox works here")

    @pytest.mark.skipif(bool(Bwrap().missing()), reason="no bubblewrap")
    def test_it_disappears_while_scoring(self, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
        tier = Bwrap()
        monkeypatch.setattr(livecodebench, "choose", lambda unsafe: Sandbox(tier, "passed"))
        doc = docs()["kvb_001"]
        assert task.score(doc, answer(RIGHT["kvb_001"])).value == 1.0
        monkeypatch.setattr(tier, "program", "/nonexistent/bwrap")
        score = task.score(doc, answer(RIGHT["kvb_001"]))
        assert (score.value, score.status) == (None, "sandbox_error")
        assert "tier bwrap cannot be started" in score.note

    def test_unsafe_is_stamped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import dataclasses

        task = get_task("livecodebench")
        task.services = dataclasses.replace(task.services, unsafe_code=True)
        monkeypatch.setattr("kvbench.scoring.sandbox.selection.TIERS", ())
        choose.cache_clear()
        try:
            score = task.score(docs()["kvb_001"], answer(RIGHT["kvb_001"]))
        finally:
            choose.cache_clear()
        assert (score.value, score.facts["sandbox_tier"], score.facts["sandbox_selftest"]) == (1.0, "none", None)


def test_bad_test_data_are_no_score(task: Task) -> None:
    import dataclasses

    doc = docs()["kvb_001"]
    for private, note in (("!", "neither JSON nor base64"), ("[]", "no tests")):
        bad = dataclasses.replace(doc, reference=doc.reference | {"public": "[]", "private": private})
        score: Score = task.score(bad, answer("print(1)"))
        assert (score.value, score.status) == (None, "grader_error")
        assert note in score.note


@pytest.mark.skipif(bool(Bwrap().missing() and Landlock().missing()), reason="no sandbox")
def test_in_a_scoring_process(task: Task) -> None:
    """It has a memory limit and a watchdog of its own."""
    found = docs()
    with ScorePool(1) as pool:
        right = pool.submit(task, found["kvb_004"], answer(RIGHT["kvb_004"]))
        hungry = pool.submit(task, found["kvb_001"], answer("x = bytearray(8 << 30)"))
        assert right.result().value == 1.0, right.result()
        assert hungry.result().facts["verdict"] == "memory_limit"


def test_the_task_travels(task: Task) -> None:
    copy = pickle.loads(pickle.dumps(task))
    assert copy.manifest == task.manifest
    assert task.needs == {"code"}
    assert "1024 MiB" in task.sources()["limits"]
