"""Tile sizes of the Triton kernels, and where they can run. Imports no triton.

The tables hold what compiles for every variant of a kernel without spilling registers and fits in shared memory;
tests/attention/test_triton_compile.py asserts it. Two tables: one for compute capability 9.0 (H100, H200), whose
matrix instructions read shared memory, so that registers are left for a second head; one for all others from 8.0 on,
kept within the 99 KiB of shared memory that the smaller of these have.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

MAX_HEAD_DIM = 128
MIN_CAPABILITY = (8, 0)
SHARED_MEMORY = {"hopper": 227 * 1024, "ampere": 99 * 1024}  # bytes that one program can have


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched: keys in a tile, warps and pipeline stages of a program, query heads it takes.

    blocks: whether the tile's queries are a block or a line.
    """

    keys: int
    warps: int
    stages: int
    heads: int = 1
    blocks: bool = False


@dataclass(frozen=True)
class Tiles:
    """The sizes for one kind of input.

    queries: in a block. Lists of live keys belong to blocks. line: queries in a line, a divisor of `queries`.
    Carries, and sums in the backward pass, belong to lines. carry: also for the kernels of the memory term.
    """

    queries: int
    line: int
    carry: Launch
    forward: Launch
    key_gradient: Launch
    query_gradient: Launch
    selection_gradient: Launch

    def __post_init__(self) -> None:
        assert self.forward.blocks
        assert self.query_gradient.blocks


def head_block(head_dim: int) -> int:
    """The power of two, at least 16, to which a head is padded."""
    return max(16, 1 << (head_dim - 1).bit_length())


# (family, bytes of a number, padded head size) -> sizes
_TABLE: dict[tuple[str, int, int], Tiles] = {}


def _add(family: str, width: int, sizes: tuple[int, ...], tiles: Tiles) -> None:
    for size in sizes:
        _TABLE[family, width, size] = tiles


def _test(keys=32,st=2):
    l=Launch(keys,4,st); b=Launch(keys,4,st,1,True)
    return Tiles(64,32,l,b,l,b,l)
for _f in ("ampere","hopper"):
    _add(_f,2,(16,32,64),_test(64))
    _add(_f,2,(128,),_test())
    _add(_f,4,(16,32,64,128),_test())

def family(capability: tuple[int, int]) -> str:
    """The table for a compute capability."""
    return "hopper" if capability == (9, 0) else "ampere"


def choose_tiles(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tiles:
    """The sizes for heads of `head_dim` features of type `dtype` on a GPU of that compute capability."""
    return _TABLE[family(capability), dtype.itemsize, head_block(head_dim)]


def tiles_for(q: torch.Tensor) -> Tiles:
    """The sizes for q [b, h, n, d] on its device. The interpreter takes those of 8.0."""
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else MIN_CAPABILITY
    return choose_tiles(q.shape[-1], q.dtype, capability)


def precision(dtype: torch.dtype) -> str:
    """How products of float32 are computed, for `tl.dot`.

    TF32 where the user allows it for matrix products (`torch.set_float32_matmul_precision`). Otherwise three TF32
    products that together are as exact as float32, several times faster than float32 multiplications outside the
    tensor cores. Selection logits are not treated better than others: eager's own would be TF32 too.
    """
    if dtype != torch.float32:
        return "tf32"  # has no effect
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def interpreted() -> bool:
    """True if kernels run in Triton's interpreter, on any device: TRITON_INTERPRET=1, set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def availability(device_type: str) -> str | None:
    """None if the Triton kernels can run on that kind of device here, else what is missing and the remedy."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if interpreted():
        return None
    if device_type != "cuda":
        return f"it needs a CUDA device, not {device_type}"
    if torch.version.hip is not None:
        return "it is made for NVIDIA GPUs, and this PyTorch is built for AMD's"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    capability = min(torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count()))
    if capability < MIN_CAPABILITY:
        return f"it needs compute capability 8.0 or newer (Ampere), and a GPU here has {capability[0]}.{capability[1]}"
    return None
