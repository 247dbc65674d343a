"""Compiling, without a GPU, exactly the Triton kernels that a call would launch, and reading what they need."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from selmodel.attention.kernels import triton_config, triton_launch

TYPE_NAMES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
}


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
        shown = {name: value for name, value in self.constants if name.isupper()}
        return f"{self.kernel} {dict(self.signature).get('Qs', '')} {shown} warps={self.warps} stages={self.stages}"


@dataclass(frozen=True)
class Resources:
    """Bytes of shared memory of a program; registers, bytes of stack and of local memory of a thread."""

    shared: int
    registers: int
    stack: int
    local: int


class _Recorder:
    """Stands for a kernel: `recorder[grid](...)` notes the variant and launches nothing."""

    def __init__(self, kernel, variants: dict[Variant, None]) -> None:
        self.kernel, self.variants = kernel, variants

    def __getitem__(self, grid):
        return self.record

    def record(self, *args, num_warps=4, num_stages=3, **constants) -> None:
        signature, aligned = [], []
        constants = list(constants.items())
        for index, (param, value) in enumerate(zip(self.kernel.params, args, strict=False)):
            if isinstance(value, torch.Tensor):
                signature.append((param.name, TYPE_NAMES[value.dtype]))
                aligned.append(index)  # as allocations are
            elif isinstance(value, float):
                signature.append((param.name, "fp32"))
            elif value == 1 and not param.do_not_specialize:
                signature.append((param.name, "constexpr"))
                constants.append((param.name, 1))
            else:
                signature.append((param.name, "i32"))
                if value % 16 == 0 and not param.do_not_specialize:
                    aligned.append(index)
        signature += [(name, "constexpr") for name, _ in constants if name not in dict(signature)]
        name = self.kernel.fn.__name__
        self.variants[
            Variant(name, tuple(signature), tuple(constants), tuple(aligned), num_warps, num_stages)
        ] = None


def launched(
    head_dim: int, dtype: torch.dtype, capability: tuple[int, int], *, heads=(4, 4), tf32=False, tiles=None, **calls
) -> list[Variant]:
    """Every kernel that forward and backward passes on such inputs launch on such a GPU.

    calls: live (False, True), memory (True,), deterministic (False, True): the values to go through.
    """
    variants: dict[Variant, None] = {}
    names = [name for name in vars(triton_launch) if name.endswith("_kernel")]
    tiles = tiles or triton_config.choose_tiles(head_dim, dtype, capability)
    b, (h, h_kv), n = 2, heads, 256
    q, out, d_out, d_q = (torch.zeros(b, n, h, head_dim, dtype=dtype).transpose(1, 2) for _ in range(4))
    k, v, d_k, d_v = (torch.zeros(b, n, h_kv, head_dim, dtype=dtype).transpose(1, 2) for _ in range(4))
    lse = torch.zeros(b, h, n)
    carries = torch.zeros(b, n // tiles.line, n)
    rows = torch.zeros(b, n)
    precision = "tf32" if tf32 or dtype != torch.float32 else "tf32x3"
    with contextlib_all(
        *[mock.patch.object(triton_launch, name, _Recorder(getattr(triton_launch, name), variants)) for name in names],
        mock.patch.object(triton_config, "tiles_for", lambda q: tiles),
        mock.patch.object(triton_config, "precision", lambda dtype: precision),
    ):
        for live in calls.get("live", (False, True)):
            thresholds = rows if live else None
            triton_launch.forward(q, k, v, None, thresholds, 0, 1.0, out, lse, carries, rows)
            for deterministic in calls.get("deterministic", (False, True)):
                with mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda value=deterministic: value):
                    triton_launch.backward(
                        d_out, rows, q, k, v, out, lse, carries, None, thresholds, 0, 1.0, d_q, d_k, d_v
                    )
    return list(variants)


def contextlib_all(*managers):
    """All of the context managers at once."""
    from contextlib import ExitStack

    stack = ExitStack()
    for manager in managers:
        stack.enter_context(manager)
    return stack


def compile_for(variant: Variant, capability: tuple[int, int]) -> Resources:
    """Compile to machine code; raises what triton or ptxas raise."""
    kernel = getattr(triton_launch, variant.kernel)
    attributes = {(index,): [["tt.divisibility", 16]] for index in variant.aligned}
    source = ASTSource(kernel, dict(variant.signature), dict(variant.constants), attributes)
    major, minor = capability
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", major * 10 + minor, 32),
        options={"num_warps": variant.warps, "num_stages": variant.stages},
    )
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout))
    return Resources(compiled.metadata.shared, int(found["REG"]), int(found["STACK"]), int(found["LOCAL"]))
