"""A harness that runs a program as LiveCodeBench's checker does, inside the box (see `kvbench.scoring.sandbox.inside`).

Follows ``lcb_runner/evaluation/testing_util.py`` (28fef95) bug by bug, because published scores contain its bugs. A
program for standard input becomes the body of a function, with its imports before the function. `sys.stdin` is an
object that cannot be iterated; its ``read`` always returns the whole input, and its ``buffer.readline`` always returns
the first line. A program that imports stdin by name gets lines without their ends. Only output through `sys.stdout`
counts. `quit`, `os.getcwd` and similar functions are None. One process and, for functions, one object serve all tests.

The harness does not compare outputs. Its answers begin with a letter: R ready, O output (text, or a value as JSON), E
an exception, M out of memory, T an exception that names a time-out.
"""

import ast
import builtins
import io
import json
import math
import os
import sys
import types
from collections.abc import Callable
from typing import Any

_NONE = (
    *("kill", "system", "putenv", "remove", "removedirs", "rmdir", "fchdir", "setuid", "fork", "forkpty", "killpg"),
    *("rename", "renames", "truncate", "replace", "unlink", "fchmod", "fchown", "chmod", "chown", "chroot", "lchflags"),
    *("lchmod", "lchown", "getcwd", "chdir"),
)
_ABSENT = ("ipdb", "joblib", "resource", "psutil", "tkinter")
_OTHER = {"shutil": ("rmtree", "move", "chown"), "subprocess": ("Popen",)}
UNLIKE = "\0"  # key of the dictionary that stands for a value without an equal in JSON
_options: dict[str, Any] = {}


def setup(options: dict[str, Any]) -> None:
    """Import and define what all runs of the program share; called before the fork.

    `options`: prelude (import lines), function (name, or None for standard input), preload (modules that the program
    mentions), native (call the function without the checker's oddities).
    """
    import _sitebuiltins

    _options.update(options)
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    for name in options["preload"]:
        __import__(name)
    exec(options["prelude"], {})


def main(program: str, ask: Callable[[], bytes | None], tell: Callable[[bytes], None]) -> int:
    name = _options["function"]
    sys.set_int_max_str_digits(50000)
    try:
        if _options["native"]:
            run = _function(_plain_module(program), name)
        else:
            _guard(program)
            run = _stdin_program(program) if name is None else _function(_compile(_prelude() + "\n\n" + program), name)
        tell(b"R")
    except Exception as error:
        tell(_failed(error))
        return 0
    while (question := ask()) is not None:
        try:
            tell(run(question.decode(errors="surrogatepass")))
        except Exception as error:
            tell(_failed(error))
            return 0
    return 0


def _failed(error: Exception) -> bytes:
    if isinstance(error, MemoryError):
        return b"M"
    try:
        text = repr(error)
    except Exception:
        text = ""
    return (b"T" if "timeoutexception" in text.lower() else b"E") + text[:500].encode(errors="replace")


def _guard(program: str) -> None:
    if "multiprocessing" in program or "ProcessPoolExecutor" in program:
        __import__("multiprocessing")  # it calls os.getcwd; the checker's process has imported it already
    os.environ["OMP_NUM_THREADS"] = "1"
    builtins.quit = builtins.help = None  # type: ignore[assignment]
    for name in _NONE:
        setattr(os, name, None)
    for name in _ABSENT:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in _OTHER.items():
        if module in program:
            for name in names:
                setattr(__import__(module), name, None)


def _prelude() -> str:
    return str(_options["prelude"])


def _compile(text: str) -> Any:
    module = types.ModuleType("tmp_sol", "")
    exec(compile(text, "<string>", "exec", dont_inherit=True), module.__dict__)
    return module.Solution() if "class Solution" in text else module


# --- standard input ---------------------------------------------------------------------------------------------------


class _Buffer:
    def __init__(self, text: str) -> None:
        self.data = text.encode(errors="surrogatepass")

    def read(self, *_: Any) -> bytes:
        return self.data

    def readline(self, *_: Any) -> bytes:
        return self.data.split(b"\n")[0] + b"\n"


class _Stdin:
    def __init__(self, text: str) -> None:
        self.text, self.stream, self.buffer = text, io.StringIO(text), _Buffer(text)

    def read(self, *_: Any) -> str:
        return self.text

    def readline(self, *arguments: Any) -> str:
        return self.stream.readline(*arguments)

    def readlines(self, *_: Any) -> list[str]:
        return self.text.split("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _stdin_program(program: str) -> Callable[[str], bytes]:
    real = sys.stdin
    function = _compile(_as_function(_without_main(program))).wrapped_function

    def run(text: str) -> bytes:
        lines = iter(text.split("\n"))
        real.readline = lambda *_: next(lines)  # type: ignore[method-assign]
        real.readlines = lambda *_: text.split("\n")  # type: ignore[method-assign]
        real.read = lambda *_: text  # type: ignore[method-assign]
        opened, printed, seen = builtins.open, sys.stdout, io.StringIO()
        builtins.open = lambda *_, **__: io.StringIO(text)  # type: ignore[assignment]
        seen.close = lambda _: None  # type: ignore[assignment, misc]
        sys.stdin, sys.stdout = _Stdin(text), seen
        try:
            function()
        except SystemExit:
            pass
        finally:
            sys.stdin, sys.stdout, builtins.open = real, printed, opened
        return b"O" + seen.getvalue().encode(errors="surrogatepass")

    return run


def _without_main(program: str) -> str:
    """Return the program with a final ``if __name__ == '__main__'`` replaced by its body; without one, return the
    program unchanged."""
    try:
        body = ast.parse(program).body
        last = body[-1]
        if isinstance(last, ast.If) and ast.unparse(last.test).strip() == "__name__ == '__main__'":
            return _unparse(body[:-1]) + "\n" + _unparse(last.body)
    except Exception:
        pass
    return program


def _as_function(program: str) -> str:
    try:
        body = ast.parse(program).body
        imports: list[ast.stmt] = [part for part in body if isinstance(part, (ast.Import, ast.ImportFrom))]
        rest = [part for part in body if not isinstance(part, (ast.Import, ast.ImportFrom))]
        given = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        function = ast.FunctionDef(name="wrapped_function", args=given, body=rest, decorator_list=[], lineno=-1)
        if sys.version_info >= (3, 12):
            function.type_params = []
        return "\n".join([_prelude(), _unparse(imports), ast.unparse(function)])
    except Exception:
        return program


def _unparse(body: list[ast.stmt]) -> str:
    return ast.unparse(ast.Module(body=body, type_ignores=[]))


# --- functions --------------------------------------------------------------------------------------------------------


def _plain_module(program: str) -> Any:
    """Run the prelude, then the program, in one new module.

    Returns an object of the program's class Solution, or the module if it has no such class. Prelude and program are
    compiled separately, so that the program may begin with `from __future__`.
    """
    module = types.ModuleType("solution")
    sys.modules[module.__name__] = module
    exec(_prelude(), module.__dict__)
    exec(compile(program, "program.py", "exec", dont_inherit=True), module.__dict__)
    return module.Solution() if hasattr(module, "Solution") else module


def _function(target: Any, name: str) -> Callable[[str], bytes]:
    method = getattr(target, name)

    def run(text: str) -> bytes:
        value = method(*[json.loads(line) for line in text.split("\n")])
        value = list(value) if isinstance(value, tuple) else value
        return b"O" + json.dumps(_plain(value)).encode()

    return run


def _plain(value: Any) -> Any:
    """Return a program's value in the types that JSON has. A value that equals no JSON value, such as a tuple in a
    list, is replaced by a dictionary that equals no expected value (`_unlike`)."""
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str.__str__(value)
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list):
        return [_plain(part) for part in list.__iter__(value)]
    if isinstance(value, dict):
        pairs = list(dict.items(value))
        return (
            {str.__str__(k): _plain(v) for k, v in pairs}
            if all(isinstance(k, str) for k, _ in pairs)
            else _unlike(value)
        )
    if type(value).__module__ in ("numpy", "fractions", "decimal"):
        return _number(value)
    return _unlike(value)


def _number(value: Any) -> Any:
    """Return a number of numpy, fractions or decimal as one of the types that JSON has. Raises ValueError for an array
    that does not hold exactly one number, as numpy does when such an array is used as a truth value."""
    if getattr(value, "ndim", 0):
        if value.size != 1:
            raise ValueError("the truth value of an array is ambiguous")
        return value.tolist()
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if value == value and not math.isinf(value) and value == int(value):
        return int(value)
    return float(value) if value == float(value) else _unlike(value)


def _unlike(value: Any) -> dict[str, str]:
    return {UNLIKE: type(value).__name__}
