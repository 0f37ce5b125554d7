"""Compiles kvbench's Triton kernels for GPUs that are not here and prints their use of a multiprocessor, as Markdown.

    python tests/tools/cubins.py > results/speed/kernels.md

The arguments of each kernel are those that kvbench's own function passes at the named shape. The figures are the
assembler's: registers per thread, bytes that a thread spills to memory, shared memory per block, and how many blocks
fit on a multiprocessor at once. `--json` prints an object per line.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvbench.engine.cache import compaction_kernel
from kvbench.engine.cache.paged import PAGE
from kvbench.engine.kernels import decode, sample
from kvbench.engine.kernels.backends import splits
from kvbench.eviction.terms import redundancy_kernel, window_attention_kernel
from kvbench.records import Sampling

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
GPUS = {80: ("A100", 164 << 10), 90: ("H100, H200", 228 << 10), 100: ("B200", 228 << 10)}  # shared memory in bytes
RESERVED = 1 << 10  # bytes of shared memory that a block takes beside its own
REGISTERS = 65536  # of a multiprocessor
TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
}
Call = tuple[str, list[Any], dict[str, Any]]  # name of a kernel, its arguments


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def decoding(
    slots: int,
    rows: int,
    heads: int,
    group: int,
    dim: int,
    *,
    paged: bool = False,
    sinks: bool = False,
    latent: int = 0,
    sums: bool = False,
    **more: Any,
) -> Callable[[], Any]:
    """A decode step of one layer, in bfloat16."""

    def call() -> None:
        store = (slots * heads * rows,) if paged else (slots, heads, rows)
        value = 0 if latent else dim
        table = empty(slots, heads, rows // PAGE, dtype=torch.int32) if paged else None
        decode.decode(
            *(empty(slots, heads * group, dim), empty(slots, heads, dim), empty(slots, heads, value)),
            *(
                empty(*store, dim),
                empty(*store, value),
                empty(slots, 1, dtype=torch.int64),
                empty(slots, dtype=torch.int64),
            ),
            splits=splits(rows, slots * heads),
            scaling=dim**-0.5,
            table=table,
            sinks=empty(heads * group) if sinks else None,
            latent=latent,
            sums=empty(slots, heads, group, rows, dtype=torch.float32) if sums else None,
            **more,
        )

    return call


def sampling(**filters: Any) -> Callable[[], Any]:
    number = empty(96, dtype=torch.int64)
    return lambda: sample.draw(empty(96, 151_936), number, number, Sampling(temperature=0.6, **filters))


def redundancy(rows: int, dim: int, *, masked: bool = False) -> Callable[[], Any]:
    """The sums of redundancy of `rows` layers of slots with 8 heads of 1,152 entries."""

    def call() -> None:
        line, total = empty(rows * 8, 1152, dtype=torch.float32), empty(rows * 8, dim, dtype=torch.float32)
        one, more = (empty(rows * 8, count, dtype=torch.int64) for count in (1152, 1153))
        valid = empty(rows, 8, 1152, dtype=torch.bool) if masked else None
        redundancy_kernel.launch(
            *(empty(rows, 8, 1152, dim), valid, line, more, one, 0.5), *(line, total, line, one, one), 1 << 40
        )

    return call


def window(w: int, heads: int, group: int, dim: int, **options: Any) -> Callable[[], Any]:
    """Attention of the newest `w` queries of 96 sequences with 1,152 entries per head."""

    def call() -> None:
        b, hk = 96, heads
        out = empty(b, hk, 1152, dtype=torch.float32)
        given = dict(scaling=dim**-0.5, softcap=None, group_first=False, reduce_g="mean", reduce_q="mean", newest=())
        window_attention_kernel.launch(
            *(empty(b, hk * group, w, dim), empty(b, hk, 1152, dim), out, empty(b, w, dtype=torch.int64), out),
            empty(b, hk, group, w, dtype=torch.float32),
            **given | options,
        )

    return call


def compaction(rows: int, heads: int, dim: int, *, paged: bool = False, latent: bool = False) -> Callable[[], Any]:
    """Evictions of 128 of 1,152 entries per head in `rows` layers of slots; one column."""

    def call() -> None:
        places, page = (rows, heads, 1152), PAGE if paged else 0
        shape = (rows * heads * 1152,) if paged else places
        line, column = empty(*shape, dtype=torch.int32), empty(*shape, dtype=torch.float32)
        tensors = [empty(*shape, dim), empty(*shape, 0 if latent else dim), line, column]
        table = empty(rows, heads, 1152 // PAGE, dtype=torch.int32) if paged else None
        keep, index = empty(*places, dtype=torch.bool), empty(rows, dtype=torch.int64)
        compaction_kernel.compact(keep, 128, tensors, index, 1152 // (page or 1), table, page)

    return call


SHAPES: dict[str, Callable[[], Any]] = {
    "dense, 96 slots (default)": decoding(96, 1152, 8, 4, 128),
    "paged, 96 slots (default)": decoding(96, 1152, 8, 4, 128, paged=True),
    "dense, 4 slots": decoding(4, 33_024, 8, 4, 128),
    "dense, 96 slots, attention summed": decoding(96, 1152, 8, 4, 128, sums=True),
    "dense, 4 slots, attention summed": decoding(4, 33_024, 8, 4, 128, sums=True),
    "gemma2, dimension 256, softcap": decoding(96, 1152, 8, 2, 256, softcap=50.0),
    "gpt-oss, dimension 64, sinks": decoding(96, 1152, 8, 8, 64, sinks=True),
    "deepseek-v3, latent attention": decoding(96, 1152, 1, 128, 576, latent=512),
    "deepseek-v3, latent attention, paged": decoding(96, 1152, 1, 128, 576, latent=512, paged=True),
    "glm-4.7-flash, latent attention": decoding(96, 1152, 1, 20, 576, latent=512),
    "sampling, top-p 0.95, top-k 20": sampling(top_p=0.95, top_k=20),
    "attention of 1 query": window(1, 8, 4, 128),
    "attention of 16 queries, the largest of the group": window(16, 8, 4, 128, reduce_g="max"),
    "attention of 32 queries, newest 8, 16 and 32": window(
        32, 4, 7, 128, reduce_g=None, reduce_q="sum", newest=(8, 16, 32)
    ),
    "attention of 32 queries, every probability, dimension 256": window(
        32, 8, 2, 256, softcap=50.0, reduce_g=None, reduce_q=None
    ),
    "attention of 8 queries, logits reduced": window(8, 8, 4, 128, group_first=True, reduce_g="max"),
    "compaction, dense": compaction(96, 8, 128),
    "compaction, paged": compaction(96, 8, 128, paged=True),
    "compaction, paged, dimension 256": compaction(96, 8, 256, paged=True),
    "compaction, dense, latent attention": compaction(96, 1, 576, latent=True),
    "redundancy, 96 rows": redundancy(96, 128),
    "redundancy, paged, dimension 256": redundancy(96, 256, masked=True),
}


def calls(modules: tuple[ModuleType, ...], run: Callable[[], Any]) -> list[Call]:
    """The kernels that `run` starts, with their arguments."""
    found: list[Call] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **constants: found.append((self.name, list(args), constants))

    kernels = [(m, n, k) for m in modules for n, k in vars(m).items() if isinstance(k, triton.JITFunction)]
    for module, name, _ in kernels:
        setattr(module, name, Recorder(name))
    try:
        run()
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)
    return found


def compiled(kernel: Any, args: list[Any], constants: dict[str, Any], capability: int) -> Any:
    options = {k: constants[k] for k in ("num_warps", "num_stages") if k in constants}
    constants = {k: v for k, v in constants.items() if k not in options}
    names, signature, attributes = kernel.arg_names, dict.fromkeys(kernel.arg_names, "constexpr"), {}
    for place, value in enumerate(args):
        whole = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        whole = whole and not kernel.params[place].do_not_specialize
        kind = f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else {int: "i32", float: "fp32"}[type(value)]
        signature[names[place]] = kind
        attributes |= {(place,): [["tt.divisibility", 16]]} if whole else {}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(binary: Any, capability: int) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    warps, shared = binary.metadata.num_warps, binary.metadata.shared
    by_registers = REGISTERS // (-(-counts["REG"] // 8) * 8 * 32 * warps)
    blocks = min(by_registers, GPUS[capability][1] // (shared + RESERVED), 64 // warps, 32)
    spilled = counts["STACK"] + counts["LOCAL"]
    return {"registers": counts["REG"], "spilled": spilled, "shared": shared, "warps": warps, "blocks": blocks}


def figures() -> Iterator[dict[str, Any]]:
    modules = (decode, sample, redundancy_kernel, window_attention_kernel, compaction_kernel)
    for shape, run in SHAPES.items():
        for name, args, constants in calls(modules, run):
            kernel = next(vars(module)[name] for module in modules if name in vars(module))
            for capability in GPUS:
                binary = compiled(kernel, args, constants, capability)
                yield {"shape": shape, "kernel": name, "sm": capability} | usage(binary, capability)


def main() -> None:
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    if "--json" in sys.argv:
        for row in figures():
            print(json.dumps(row), flush=True)
        return
    print(f"Compiled by Triton {triton.__version__} for bfloat16; `python tests/tools/cubins.py`.\n")
    print("| shape | kernel | GPU | registers | spilled bytes | shared KiB | warps | blocks per multiprocessor |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for r in figures():
        gpu = f"sm_{r['sm']} ({GPUS[r['sm']][0]})"
        cells = (r["registers"], r["spilled"], f"{r['shared'] / 1024:.1f}", r["warps"], r["blocks"])
        print(f"| {r['shape']} | `{r['kernel']}` | {gpu} | {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
