"""Self-test of a tier: run the escapes in a box of the tier, and refuse the tier if any escape succeeds.

Every process that runs programs runs the self-test first, because a tier that isolates on one machine may fail on
another.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import platform
import secrets
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.scoring.sandbox import escapes, inside
from kvbench.scoring.sandbox.box import Box, BoxError, Outcome
from kvbench.scoring.sandbox.cleanup import remove_tree
from kvbench.scoring.sandbox.limits import Limits
from kvbench.scoring.sandbox.plan import FIRST_USER, USERS, Plan, machine
from kvbench.scoring.sandbox.tiers import Tier

PROBE_LIMITS = Limits(memory=512 << 20)  # less than programs get, so that the escape MEMORY ends soon
_SEALS = 15  # F_SEAL_SEAL, _SHRINK, _GROW and _WRITE
_READ_ALL = 4  # CAP_DAC_READ_SEARCH
_STATE = {  # what `escapes.STATE` must report
    "environment": ["OMP_NUM_THREADS"],
    "folder": "/",
    "descriptors": [0, 1, 2],
    "seals": _SEALS,
    "modules": [],
    "no new privileges": 1,
    "filter": 2,
    "dumpable": 0,
    "ends with its parent": 9,
    "own session": True,
    "flags": [1, True, 1],  # no_site, safe_path, no_user_site
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """The result of a self-test. The tier may be used if there are no `problems` (one line each).

    digest: hash of tier, machine, versions, escapes and problems; rows hold it in the column `sandbox_selftest`.
    """

    tier: str
    problems: tuple[str, ...]
    digest: str


def selftest(tier: Tier, *, limits: Limits = PROBE_LIMITS, plan: Plan | None = None) -> SelfTest:
    """Run the escapes in a tier, if the tier can run here, and return the result. plan: the lockdown to test; None: the
    tier's own. kvbench's tests pass lockdowns that lack a part."""
    reason = tier.missing()
    problems = [reason] if reason else _probe(tier, limits, plan or tier.plan(limits))
    names = sorted([*(escape.name for escape in escapes.INNER), escapes.NAMESPACES.name, "state"])
    facts = [tier.name, machine(), platform.release(), platform.python_version(), names, problems]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    return SelfTest(tier=tier.name, problems=tuple(problems), digest=digest)


def _probe(tier: Tier, limits: Limits, plan: Plan) -> list[str]:
    problems: list[str] = []
    try:
        with _scene(limits) as values, Box(tier, limits, plan=plan) as box:
            for escape in escapes.INNER:
                if machine() in escape.machines:
                    problems += _run(box, escape, values)
            box.load(inside.text("script"), escapes.STATE)
            problems += _state(box.run(b"input", seconds=10), tier, limits)
        if tier.namespaces:  # the namespaces must isolate even without the lockdown
            alone = dataclasses.replace(plan, inner=())
            with _scene(limits) as values, Box(tier, limits, plan=alone) as box:
                problems += _run(box, escapes.NAMESPACES, values)
                if _left_segment(values["key"]):
                    problems.append("the box alone: the program shares System V memory with other processes")
    except BoxError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"the self-test cannot run: {error}")
    return problems


def _run(box: Box, escape: escapes.Escape, values: dict[str, Any]) -> list[str]:
    box.load(inside.text("script"), escapes.fill(escape.program, values))
    problem = escape.check(box.run(b"input", seconds=escape.seconds))
    return [f"{escape.name}: {problem}"] if problem else []


@contextlib.contextmanager
def _scene(limits: Limits) -> Iterator[dict[str, Any]]:
    """Create, outside the box, what the escape programs try to reach (writable files, sockets). Yield the values that
    `fill` writes into these programs."""
    folder = Path(tempfile.mkdtemp(prefix="kvbench-probe-"))
    abstract = f"kvbench-probe-{secrets.token_hex(8)}"
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as local:
        try:
            canary = folder / "canary"
            canary.write_text("canary", encoding="utf-8")
            canary.chmod(0o666)
            folder.chmod(0o777)
            listener.bind(("127.0.0.1", 0))
            local.bind(f"\0{abstract}")
            listener.listen()
            local.listen()
            yield {
                "canary": str(canary),
                "folder": str(folder),
                "pid": os.getpid(),
                "port": listener.getsockname()[1],
                "abstract": abstract,
                "calls": escapes.raw_calls(),
                "key": secrets.randbelow(1 << 30) + (1 << 24),
                "megabytes": limits.memory >> 20,
                "threads": limits.threads,
            }
        finally:
            remove_tree(folder)


def _state(outcome: Outcome, tier: Tier, limits: Limits) -> list[str]:
    """Return the differences between the state that a program reports and the state that the tier promises."""
    if outcome.status != "ok":
        return [f"the program that reports its state ended with {outcome.status}"]
    state = json.loads(outcome.stdout)
    sizes = {"AS": limits.memory, "STACK": limits.stack, "FSIZE": limits.file_bytes, "NOFILE": limits.files}
    problems = [
        f"the program's state '{name}' is {state[name]}, expected {value}"
        for name, value in _STATE.items()
        if state[name] != value
    ]
    for name, bound in (sizes | {"CORE": 0, "CPU": 12}).items():
        if not 0 <= (size := state["limits"][name][1]) <= bound:
            problems.append(f"the program's limit {name} is {size}, expected at most {bound}")
    return problems + _rights(state, tier)


def _rights(state: dict[str, Any], tier: Tier) -> list[str]:
    """Return problems with a program's user and capabilities.

    The program's user must not be root. If kvbench runs as root, the user must be one of the uids that `plan.drop_root`
    chooses from; in a container this is not checked. The program may have no capability except the one to read all
    files.
    """
    users, problems = set(state["users"]), []
    if os.geteuid() == 0 and tier.name != "container":
        if len(users) != 1 or not FIRST_USER <= min(users) < FIRST_USER + USERS:
            problems.append(f"the program runs as users {sorted(users)}, expected one unused user")
    elif 0 in users:
        problems.append("the program runs as root")
    if any(state["capabilities"][2:]) or any(mask & ~_READ_ALL for mask in state["capabilities"]):
        problems.append(f"the program has the capabilities {state['capabilities']}")
    return problems


def _left_segment(key: int) -> bool:
    """Return whether a program left a System V memory segment with this key outside the box; remove the segment."""
    libc = ctypes.CDLL(None)
    segment = libc.shmget(key, 0, 0)
    if segment >= 0:
        libc.shmctl(segment, 0, None)  # IPC_RMID
    return bool(segment >= 0)
