"""Kernels compiled for GPUs that are not here: registers, spills and shared memory by the assembler's own count."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}  # bytes per multiprocessor
RESERVED = 1 << 10  # bytes of shared memory that the driver takes per block
REGISTERS = 65536  # per multiprocessor


@dataclass(frozen=True)
class Usage:
    registers: int  # per thread
    spilled: int  # bytes per thread
    shared: int  # bytes per block
    blocks: int  # that a multiprocessor holds at once


def compile_for(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: Any
) -> Usage:
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=aligned
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    shared = compiled.metadata.shared
    by_registers = REGISTERS // (-(-counts["REG"] // 8) * 8 * 32 * options["num_warps"])
    blocks = min(by_registers, SHARED[capability] // (shared + RESERVED), 64 // options["num_warps"], 32)
    return Usage(counts["REG"], counts["STACK"] + counts["LOCAL"], shared, blocks)
