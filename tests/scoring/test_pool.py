"""The scoring pool: hung, dying and broken scorers, plug-ins, and what worker processes import."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbench.errors import SetupError
from kvbench.scoring.pool import ScorePool
from kvbench.task import Doc, Output, Task, Turn
from kvbench.taskkit.names import get_task

PLUGIN = '''
import os, signal, sys, time
from kvbench.task import Score, Task, GenSpec


class Odd(Task):
    """Does what the output's text says, in at most `seconds`."""

    name = "odd"
    seconds = 40.0

    def patience(self, doc):
        return self.seconds

    def docs(self, source, *, style="default", limit=None):
        return []

    def gen(self, model_type):
        return GenSpec(max_new_tokens=1)

    def score(self, doc, output):
        what = output.text
        if what == "hang":
            while True:
                pass
        if what == "hang hard":
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
            time.sleep(1000)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raise":
            raise ValueError("no\\nscore")
        if what == "print":
            print("noise" * 100_000)
            os.write(1, b"noise")
        if what == "environment":
            return Score(value=1.0, extracted=open("/proc/self/environ").read())
        if what == "memory":
            [0] * 10**10
        if what == "modules":
            return Score(value=1.0, extracted=",".join(sorted(sys.modules)))
        return Score(value=1.0, extracted=str(os.getpid()))


class Cheap(Odd):
    cheap_score = True
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("plugin") / "odd_plugin.py"
    file.write_text(PLUGIN, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("odd_plugin", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["odd_plugin"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["odd_plugin"]


DOC = Doc(doc_id="q", turns=(Turn(question="?"),), reference="204")


def hurried(plugin) -> Task:
    task = plugin.Odd()
    task.seconds = 1.0
    return task


def out(text: str) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=False)


def test_bad_scorers_harm_nobody_else(plugin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvbench.scoring.pool.FIRST_SECONDS", 0.5)
    texts = ["fine", "raise", "die", "fine", "hang", "fine", "hang hard", "print", "memory", "fine"]
    with ScorePool(2) as pool:
        futures = [pool.submit(hurried(plugin), DOC, out(text)) for text in texts]
        scores = dict(zip(enumerate(texts), [future.result(timeout=60) for future in futures], strict=True))
    for (_, text), score in scores.items():
        if text in ("fine", "print"):
            assert score.value == 1.0, text
        else:
            assert score.value is None
    notes = {text: score.note for (_, text), score in scores.items()}
    assert notes["raise"].startswith("error: ValueError: no")
    assert notes["die"].startswith("crashed: the scoring process ended with code -9")
    assert notes["hang"].startswith("timeout: ")
    assert notes["hang hard"].startswith("timeout: ")
    assert notes["memory"].startswith(("error: MemoryError", "timeout"))
    assert sum(score.note.startswith("crashed") for score in scores.values()) == 1
    assert sum(score.note.startswith("timeout") for score in scores.values()) in (2, 3)


def test_mathematics_in_the_pool():
    task = get_task("aime24")
    with ScorePool() as pool:
        right = pool.submit(task, DOC, out(r"\boxed{204}"))
        wrong = pool.submit(task, DOC, out(r"\boxed{205}"))
        assert (right.result().value, wrong.result().value) == (1.0, 0.0)
        assert right.result().aux["int_match"] == 1.0


def test_workers_import_no_torch(plugin):
    with ScorePool() as pool:
        modules = (pool.submit(plugin.Odd(), DOC, out("modules")).result().extracted or "").split(",")
    assert "kvbench.scoring.worker" in modules or "__main__" in modules
    assert not {"torch", "transformers", "datasets", "pandas", "scipy"} & set(modules)


def test_cheap_scores_need_no_process(plugin):
    with ScorePool() as pool:
        future = pool.submit(plugin.Cheap(), DOC, out("fine"))
        assert future.done()
        assert future.result().extracted == str(os.getpid())
        assert pool.submit(plugin.Cheap(), DOC, out("raise")).result().note.startswith("error: ValueError")


def test_one_process_serves_many_scores(plugin):
    with ScorePool(1) as pool:
        pids = {pool.submit(plugin.Odd(), DOC, out("fine")).result().extracted for _ in range(5)}
    assert len(pids) == 1


def test_idle_workers_that_are_killed_cost_one_score_each(plugin):
    with ScorePool(2) as pool:
        pids = {int(pool.submit(plugin.Odd(), DOC, out("fine")).result().extracted) for _ in range(6)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        scores = [pool.submit(plugin.Odd(), DOC, out("fine")).result(timeout=60) for _ in range(6)]
    crashed = [score for score in scores if score.value is None]
    assert 1 <= len(crashed) <= len(pids)
    assert all(score.note.startswith("crashed: the scoring process ended with code -9") for score in crashed)


def test_a_worker_gets_no_key(plugin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-no-business-here")
    with ScorePool() as pool:
        environment = pool.submit(plugin.Odd(), DOC, out("environment")).result().extracted
    assert "sk-no-business-here" not in environment
    assert "PATH" in environment


def test_a_hung_worker_ends_soon_after_its_parent_was_killed(plugin, tmp_path: Path):
    script = tmp_path / "main.py"
    marker = tmp_path / "imported"
    script.write_text(
        f"import os, sys, time; open({str(marker)!r}, 'a').write('x')\n"
        f"sys.path.insert(0, {str(Path(plugin.__file__).parent)!r})\n"
        "import odd_plugin\nfrom kvbench.scoring import pool\nfrom kvbench.task import Doc, Output, Turn\n"
        "pool.FIRST_SECONDS = 0.0\n"
        "doc = Doc(doc_id='q', turns=(Turn(question='?'),), reference='1')\n"
        "def out(t): return Output(text=t, stop_reason='stop', prompt_tokens=1, output_tokens=1, thinking=False)\n"
        "scores, task = pool.ScorePool(), odd_plugin.Odd()\n"
        "task.seconds = 2.0\n"
        "print(scores.submit(task, doc, out('fine')).result().extracted, flush=True)\n"
        "scores.submit(task, doc, out('hang')); time.sleep(0.5); os.kill(os.getpid(), 9)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=60)
    pid = int(done.stdout)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and alive(pid):
        time.sleep(0.1)
    assert not alive(pid)
    assert marker.read_text() == "x"  # the worker did not import the main module


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and "Z" not in status.read_text().split()[2]


def test_a_task_that_cannot_travel(plugin):
    class Local(plugin.Odd):
        pass

    with ScorePool() as pool:
        score = pool.submit(Local(), DOC, out("fine")).result()
    assert score.value is None
    assert "cannot be sent" in score.note


def test_a_process_that_cannot_be_started_is_one_line(plugin, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with ScorePool() as pool:
        future = pool.submit(plugin.Odd(), DOC, out("fine"))
        with pytest.raises(
            SetupError, match=r"^the scoring process does not start \(Resource temporarily unavailable\)"
        ):
            future.result(timeout=60)


def test_a_time_limit_that_is_none_costs_one_score(plugin):
    broken = plugin.Odd()
    broken.seconds = "long"
    with ScorePool(1) as pool:
        notes = [pool.submit(task, DOC, out("fine")).result(timeout=60).note for task in (broken, plugin.Odd())]
    assert notes[0].startswith("error: TypeError: ")
    assert notes[1] == ""


def test_close_after_an_exception_drops_what_waits(plugin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvbench.scoring.pool.FIRST_SECONDS", 0.0)
    began = time.monotonic()
    pool = ScorePool(1)
    futures = []

    def fail():
        with pool:
            futures.extend(pool.submit(hurried(plugin), DOC, out("hang")) for _ in range(50))
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fail()
    assert time.monotonic() - began < 15
    assert sum(future.cancelled() for future in futures) >= 48


def test_closed_pool_and_unused_pool(plugin):
    pool = ScorePool()
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError):
        pool.submit(plugin.Odd(), DOC, out("fine"))


def test_a_worker_ends_with_its_parent(tmp_path: Path):
    code = (
        "import os, subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-P', '-m', 'kvbench.scoring.worker'], stdin=-1, stdout=-1)\n"
        "p.stdout.read(8); print(p.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=30, check=True)
    pid = int(done.stdout)
    for _ in range(100):
        if not alive(pid):
            return
        time.sleep(0.05)
    pytest.fail("the worker outlives its parent")


def test_the_interface_is_light():
    code = "import sys, kvbench.task, kvbench.scoring.pool; print(sorted(m for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for heavy in ("torch", "numpy", "sympy", "math_verify", "transformers", "multiprocessing"):
        assert f"'{heavy}'" not in done.stdout


def test_every_task_can_be_pickled():
    import pickle

    for name in ("aime24", "gsm8k", "walk/orbit-100"):
        task: Task = pickle.loads(pickle.dumps(get_task(name)))
        assert task.name == name
