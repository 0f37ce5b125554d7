"""The grader: a process that runs one hostile program as scoring would.

    python -m kvbench.audit.attacks.grader JOB

The program may attack this process too: its memory, command line and environment hold canaries, which are secrets that
must not leak.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError
from kvbench.scoring.livecodebench import PRELUDE, failure, harness
from kvbench.scoring.livecodebench_compare import same_lines, same_value
from kvbench.scoring.sandbox.box import Box, BoxError, Outcome
from kvbench.scoring.sandbox.inside import text
from kvbench.scoring.sandbox.limits import Limits
from kvbench.scoring.sandbox.tiers import Bwrap, Container, Landlock, Tier, Unsafe

BY_NAME: dict[str, type[Tier]] = {tier.name: tier for tier in (Bwrap, Landlock, Container, Unsafe)}


def run_program(
    source: str, mode: str, tests: Sequence[Mapping[str, Any]], limits: Mapping[str, Any], tier: Tier
) -> dict[str, Any]:
    """Run a program on one test after the other until a test fails; return the verdict and the output.

    The keys of the result are status (the verdict's name), passed, stdout and stderr.

    mode: "stdio": a test has the input ``stdin`` and the output ``expected``. "call": a test has ``args``, the
    arguments of ``Solution.add``, and the result ``expected``. limits: `wall` is a time in seconds; `mem`, `fsize` and
    `out` are bytes of memory, of a written file and of output.
    """
    box_limits = Limits(memory=limits["mem"], file_bytes=limits["fsize"], output=limits["out"])
    options = {"prelude": PRELUDE, "preload": [], "function": "add", "native": True}
    out, err, status = b"", b"", "not_run"
    try:
        with Box(tier, box_limits) as box:
            box.load(text("script") if mode == "stdio" else harness(), source, options)
            for test in tests:
                if mode == "stdio":
                    outcome = box.run(test["stdin"].encode(), seconds=limits["wall"])
                    right = same_lines(outcome.stdout.decode(errors="replace"), test["expected"])
                else:
                    outcome = box.open(seconds=limits["wall"], total=limits["wall"])
                    if outcome.answer[:1] == b"R":
                        question = "\n".join(map(json.dumps, test["args"])).encode()
                        outcome = box.ask(question, seconds=limits["wall"])
                    right = same_value(outcome.answer[1:], test["expected"], json.loads(test["expected"]))
                out, err = out + outcome.stdout + outcome.answer, err + outcome.stderr
                status = _verdict(outcome, right, mode)
                if status != "pass":
                    break
    except (BoxError, SetupError) as error:
        status, err = "sandbox_error", err + str(error).encode()
    texts = {"stdout": out.decode(errors="replace"), "stderr": err.decode(errors="replace")}
    return {"status": status, "passed": status == "pass", **texts}


def _verdict(outcome: Outcome, right: bool, mode: str) -> str:
    if mode == "call" and (failed := failure(outcome)) is not None:
        return failed[0]
    if mode == "stdio" and outcome.status != "ok":
        return outcome.status
    return "pass" if right else "wrong_answer"


def main(path: str) -> None:
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    sys.path.append(job["path"])
    held = "CANARY-" + "".join(job["memory"])  # a canary in this process's memory only
    source = job["source"].replace("@@GRADER_PID@@", str(os.getpid()))
    begun = time.monotonic()
    try:
        result = run_program(source, job["mode"], job["tests"], job["limits"], BY_NAME[job["tier"]]())
    except BaseException as error:
        result = {"status": f"grader error: {error!r}", "passed": False, "stdout": "", "stderr": "", "damage": True}
    result |= {"seconds": time.monotonic() - begun, "held": len(held)}
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
