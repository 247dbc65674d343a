"""Compiling, without a GPU, exactly the Triton kernels that a call would launch, and reading what they need.

Run as a program, it compiles all that the table of sizes can choose, and prints what each kernel needs at most:

    python tests/attention/triton_aot.py
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from selmodel.attention.kernels import triton_config, triton_launch
from selmodel.attention.kernels.triton_config import Tiles

CAPABILITIES = ((8, 0), (9, 0))
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128)  # others are padded to one of these
PRECISIONS = ((torch.bfloat16, "tf32"), (torch.float16, "tf32"), (torch.float32, "ieee"), (torch.float32, "tf32"))
TYPE_NAMES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}


@dataclass(frozen=True)
class Variant:
    """A kernel and all that its machine code depends on, but for the GPU."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]
    aligned: tuple[int, ...]
    warps: int
    stages: int

    def __str__(self) -> str:
        shown = " ".join(f"{name}={value}" for name, value in self.constants if name.isupper())
        return f"{self.kernel} {dict(self.signature).get('Qs', '')} {shown} warps={self.warps} stages={self.stages}"


@dataclass(frozen=True)
class Resources:
    """Bytes of shared memory of a program; registers, bytes of stack and of local memory of a thread."""

    shared: int
    registers: int
    stack: int
    local: int

    def faults(self, variant: Variant, capability: tuple[int, int]) -> list[str]:
        """What is beyond the limits of the GPU, or a spill where there may be none."""
        found = []
        limit = triton_config.SHARED_MEMORY[triton_config.family(capability)]
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory, of {limit}")
        if self.registers > 255:
            found.append(f"{self.registers} registers")
        if max(self.stack, self.local) > allowed_spills(variant):
            found.append(f"spills {self.stack} and {self.local} bytes")
        return [f"{capability} {variant}: {fault}" for fault in found]


def allowed_spills(variant: Variant) -> int:
    """Bytes. None, but for float32, which is for checks and not for speed: few up to 64 features, and more above."""
    if dict(variant.signature).get("Qs") != "*fp32":
        return 0
    return 32 if dict(variant.constants)["BLOCK_D"] <= 64 else 1024


class _Recorder:
    """Stands for a kernel: `recorder[grid](...)` notes the variant and launches nothing."""

    def __init__(self, kernel, variants: dict[Variant, None]) -> None:
        self.kernel, self.variants = kernel, variants

    def __getitem__(self, grid):
        return self.record

    def record(self, *args, num_warps=4, num_stages=3, **constants) -> None:
        """As triton specialises: a number that is 1 is a constant, and whether 16 divides a number is known."""
        signature, aligned, values = [], [], list(constants.items())
        for index, (param, value) in enumerate(zip(self.kernel.params, args, strict=False)):
            kind = TYPE_NAMES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            if isinstance(value, float):
                kind = "fp32"
            elif kind != "i32" or (value % 16 == 0 and not param.do_not_specialize):
                aligned.append(index)
            elif value == 1 and not param.do_not_specialize:
                kind = "constexpr"
                values.append((param.name, 1))
            signature.append((param.name, kind))
        signature += [(name, "constexpr") for name in constants]
        name = self.kernel.fn.__name__
        self.variants[Variant(name, tuple(signature), tuple(values), tuple(aligned), num_warps, num_stages)] = None


def launched(
    head_dim: int,
    dtype: torch.dtype,
    precision: str,
    capability: tuple[int, int],
    heads: int = 4,
    tiles: Tiles | None = None,
) -> list[Variant]:
    """Every kernel that forward and backward passes on such inputs launch on such a GPU."""
    variants: dict[Variant, None] = {}
    tiles = tiles or triton_config.choose_tiles(head_dim, dtype, capability)
    b, h, n = 2, heads, 256
    q, k, v, out, d_out, d_q, d_k, d_v = (torch.zeros(b, n, h, head_dim, dtype=dtype).transpose(1, 2) for _ in range(8))
    lse, carries, rows = torch.zeros(b, h, n), torch.zeros(b, n // tiles.line, n), torch.zeros(b, n)
    with ExitStack() as stack:
        for name in [name for name in vars(triton_launch) if name.endswith("_kernel")]:
            recorder = _Recorder(getattr(triton_launch, name), variants)
            stack.enter_context(mock.patch.object(triton_launch, name, recorder))
        stack.enter_context(mock.patch.object(triton_config, "tiles_for", return_value=tiles))
        stack.enter_context(mock.patch.object(triton_config, "precision", return_value=precision))
        is_deterministic = stack.enter_context(mock.patch.object(torch, "are_deterministic_algorithms_enabled"))
        for thresholds, deterministic in itertools.product((None, rows), (False, True)):
            is_deterministic.return_value = deterministic
            triton_launch.forward(q, k, v, None, thresholds, 0, 1.0, out, lse, carries, rows)
            inputs = (d_out, rows, q, k, v, out, lse, carries, None, thresholds, 0, 1.0)
            triton_launch.backward(*inputs, d_q, d_k, d_v)
    return list(variants)


def compile_for(variant: Variant, capability: tuple[int, int]) -> Resources:
    """Compile to machine code; raises what triton or ptxas raise."""
    kernel = getattr(triton_launch, variant.kernel)
    attributes = {(index,): [["tt.divisibility", 16]] for index in variant.aligned}
    source = ASTSource(kernel, dict(variant.signature), dict(variant.constants), attributes)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    compiled = triton.compile(source, target=target, options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout))
    return Resources(compiled.metadata.shared, int(found["REG"]), int(found["STACK"]), int(found["LOCAL"]))


def main() -> int:
    """Compile the whole table; print one line for each kind of input and kernel, then the faults."""
    faults = []
    for capability, (dtype, precision), head_dim in itertools.product(CAPABILITIES, PRECISIONS, HEAD_DIMS):
        worst: dict[str, list[Resources]] = {}
        for heads in (4, 3):
            for variant in launched(head_dim, dtype, precision, capability, heads):
                resources = compile_for(variant, capability)
                worst.setdefault(variant.kernel, []).append(resources)
                faults += resources.faults(variant, capability)
        for kernel, found in worst.items():
            shared, registers, stack = (max(getattr(r, x) for r in found) for x in ("shared", "registers", "stack"))
            print(
                f"{capability[0]}.{capability[1]} {dtype} {precision} head size {head_dim:3d} {kernel:26s} "
                f"{len(found):2d} variants: shared {shared / 1024:5.1f} KiB, {registers:3d} registers, stack {stack}",
                flush=True,
            )
    print(*dict.fromkeys(faults), sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
