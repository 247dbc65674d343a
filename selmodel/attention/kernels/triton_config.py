"""Tile sizes of the Triton kernels, and where they can run. Imports no triton.

The table holds sizes with which every variant of a kernel fits in shared memory and, but for float32, spills no
register; tests/attention/test_triton_compile.py asserts it. It has two families: compute capability 9.0 (H100, H200),
whose matrix instructions read shared memory, so that registers are left for more; and all others from 8.0 on, kept
within the 99 KiB of shared memory that the smaller of these have. (10.0 and 12.0 are not in the test: there it
compiles too, and spills up to 48 bytes in a few variants.)
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
    forward_single: in place of `forward`, if that takes two heads and the number of heads is odd.
    """

    queries: int
    line: int
    carry: Launch
    forward: Launch
    key_gradient: Launch
    query_gradient: Launch
    selection_gradient: Launch
    forward_single: Launch | None = None


def head_block(head_dim: int) -> int:
    """The power of two, at least 16, that a tile has for a head's features."""
    return max(16, 1 << (head_dim - 1).bit_length())


# (family, bytes of a number, padded head size) -> sizes. Chosen by what compiles, since no GPU was at hand: largest
# tiles first, two heads where both fit. On a GPU, the first to try: forward with Launch(64, 4, 3, blocks=True), which
# has twice the keys and one head, on 9.0.
_TABLE: dict[tuple[str, int, int], Tiles] = {}


def _add(family: str, width: int, sizes: tuple[int, ...], tiles: Tiles) -> None:
    for size in sizes:
        _TABLE[family, width, size] = tiles


_add(
    "ampere",
    2,
    (16, 32, 64),
    Tiles(
        queries=64,
        line=16,
        carry=Launch(64, 4, 3),
        forward=Launch(32, 4, 2, heads=2, blocks=True),
        key_gradient=Launch(128, 8, 3),
        query_gradient=Launch(32, 4, 3, blocks=True),
        selection_gradient=Launch(64, 4, 3),
        forward_single=Launch(64, 4, 2, blocks=True),
    ),
)
_add(
    "ampere",
    2,
    (128,),
    Tiles(
        queries=64,
        line=32,
        carry=Launch(64, 4, 3),
        forward=Launch(32, 4, 3, blocks=True),
        key_gradient=Launch(32, 4, 2),
        query_gradient=Launch(32, 4, 2, blocks=True),
        selection_gradient=Launch(16, 4, 2),
    ),
)
_add(
    "hopper",
    2,
    (16, 32, 64),
    Tiles(
        queries=64,
        line=32,
        carry=Launch(64, 4, 3),
        forward=Launch(32, 4, 3, heads=2, blocks=True),
        key_gradient=Launch(128, 8, 3),
        query_gradient=Launch(32, 4, 3, heads=2, blocks=True),
        selection_gradient=Launch(64, 8, 3, blocks=True),
    ),
)
_add(
    "hopper",
    2,
    (128,),
    Tiles(
        queries=64,
        line=16,
        carry=Launch(64, 4, 3),
        forward=Launch(64, 4, 3, blocks=True),
        key_gradient=Launch(128, 8, 3),
        query_gradient=Launch(32, 4, 3, blocks=True),
        selection_gradient=Launch(128, 8, 2),
    ),
)
# float32 is for checks, not for speed: it spills registers, a few bytes up to 64 features and up to 816 above.
for _family in ("ampere", "hopper"):
    _add(
        _family,
        4,
        (16, 32, 64),
        Tiles(
            queries=32,
            line=16,
            carry=Launch(32, 4, 2),
            forward=Launch(32, 4, 2, blocks=True),
            key_gradient=Launch(32, 4, 1 if _family == "ampere" else 2),
            query_gradient=Launch(32, 4, 2, heads=2, blocks=True),
            selection_gradient=Launch(32, 4 if _family == "ampere" else 8, 1),
        ),
    )
    _add(
        _family,
        4,
        (128,),
        Tiles(
            queries=32,
            line=16,
            carry=Launch(32, 4, 2),
            forward=Launch(32, 4, 2, blocks=True),
            key_gradient=Launch(32 if _family == "ampere" else 16, 4, 2),
            query_gradient=Launch(16, 4, 2, blocks=True),
            selection_gradient=Launch(16, 4, 2),
        ),
    )


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

    TF32 where the user allows it for matrix products (`torch.set_float32_matmul_precision`), else float32 outside the
    tensor cores: slow, and exact. (Three TF32 products in place of one, "tf32x3", spill registers in every tile
    tried.) The logits of the selection head are not treated better than others: eager's own would be TF32 too.
    """
    if dtype != torch.float32:
        return "tf32"  # has no effect
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


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
