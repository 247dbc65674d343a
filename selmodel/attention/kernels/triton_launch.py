"""Launching the Triton kernels: buffers, grids, and what runs after what. Importing this imports triton."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from torch.nn import functional

from selmodel.attention.kernels import triton_config as config
from selmodel.attention.kernels.common import LOG2_E
from selmodel.attention.kernels.triton_backward import (
    delta_kernel,
    key_gradient_kernel,
    later_kernel,
    memory_gradient_kernel,
    query_gradient_kernel,
    selection_gradient_kernel,
)
from selmodel.attention.kernels.triton_forward import carry_kernel, forward_kernel, live_kernel, memory_kernel

# Columns that a program of a kernel over [b, blocks, n] takes at once; its warps are enough for them.
COLUMNS = 256

# Rows of fewer features, or of a number that this does not divide, would be loaded number by number.
ALIGNED_FEATURES = 16

# Numbers of dS that the deterministic backward pass holds at once (256 MiB); it takes the queries in chunks.
STORED_NUMBERS = 2**26


@dataclass(frozen=True)
class _Call:
    """What every kernel of a call needs. q, k, v: ready to be read, see `_readable`. live: lists of live keys, or
    placeholders of the same types. d_scale: 1 / sqrt(d)."""

    q: Tensor
    k: Tensor
    v: Tensor
    starts: Tensor  # [b, n] int32
    carries: Tensor  # [b, lines, n] float32, in units of ln 2
    thresholds: Tensor | None  # [b, n] float32, in units of ln 2
    live: tuple[Tensor, Tensor]  # [b, blocks, n], [b, blocks] int32
    tiles: config.Tiles
    selection_head: int
    d_scale: float

    @property
    def n_blocks(self) -> int:
        return triton.cdiv(self.q.shape[2], self.tiles.queries)

    @property
    def n_lines(self) -> int:
        return self.carries.shape[1]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def scale(self) -> float:
        return LOG2_E * self.d_scale

    @property
    def selection(self) -> tuple[Tensor, Tensor]:
        """Queries and keys of the selection head: [b, n, d]."""
        return self.q[:, self.selection_head], self.k[:, self.selection_head // self.group]

    @property
    def selection_strides(self) -> tuple[int, ...]:
        q, k = self.q, self.k
        return q.stride(0), q.stride(2), k.stride(0), k.stride(2)

    def strides(self, *tensors: Tensor) -> list[int]:
        """Batch, head and row strides of each tensor [b, h, n, d]."""
        return [x.stride(dim) for x in tensors for dim in (0, 1, 2)]

    def options(self, launch: config.Launch) -> dict[str, object]:
        """The constants and launch options of a kernel over lines of queries, or over blocks of them."""
        d = self.q.shape[3]
        return {
            "HEAD_DIM": d,
            "BLOCK_D": config.head_block(d),
            "BLOCK_M": self.tiles.queries if launch.blocks else self.tiles.line,
            "BLOCK_N": launch.keys,
            "LINES": self.tiles.queries // self.tiles.line,
            "LIVE": self.thresholds is not None,
            "PRECISION": config.precision(self.q.dtype),
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }

    def heads(self, launch: config.Launch) -> int:
        """Query heads that one program takes: as many as the table says, or a divisor of that."""
        return math.gcd(launch.heads, self.q.shape[1])


def forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, thresholds: Tensor | None, selection_head: int,
    memory_tau: float | None, out: Tensor, lse: Tensor, carries: Tensor, memory: Tensor,
) -> None:  # fmt: skip
    """Fill out [b, h, n, d], lse [b, h, n], carries [b, lines, n], and memory [b, n] unless memory_tau is None."""
    b, h, n, d = q.shape
    with _on(q.device):
        call = _prepare(q, k, v, starts, thresholds, selection_head, carries)
        q, k, v, wide_out = call.q, call.k, call.v, _padded(out)
        carry = call.tiles.carry
        carry_kernel[(b * triton.cdiv(n, carry.keys),)](
            *call.selection, carries, call.starts, _or_placeholder(call.thresholds, carries),
            call.scale, n, *call.selection_strides, **call.options(carry),
        )  # fmt: skip
        call, _ = _with_live_keys(call)
        launch = call.tiles.forward
        if call.tiles.forward_single is not None and call.heads(launch) == 1:
            launch = call.tiles.forward_single
        heads = call.heads(launch)
        forward_kernel[(b * (h // heads) * call.n_blocks,)](
            q, k, v, *call.selection, wide_out, lse, carries, call.starts, *call.live,
            call.scale, n, h, call.group, *call.strides(q, k, v, wide_out), HEADS=heads, **call.options(launch),
        )  # fmt: skip
        _unpad(wide_out, out)
        if memory_tau is not None:
            memory_kernel[(b * call.n_lines,)](
                *call.selection, memory, carries, call.starts, *call.live,
                call.scale, memory_tau * LOG2_E, n, *call.selection_strides, **call.options(carry),
            )  # fmt: skip


def backward(
    d_out: Tensor, d_memory: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, carries: Tensor,
    starts: Tensor | None, thresholds: Tensor | None, selection_head: int, memory_tau: float | None,
    d_q: Tensor, d_k: Tensor, d_v: Tensor,
) -> None:  # fmt: skip
    """Fill d_q, d_k and d_v; d_k and d_v have the same strides.

    Sums of several programs are added in no fixed order, unless torch.use_deterministic_algorithms is on: then key
    heads keep their sums apart, and dS of the selection is stored, a chunk of queries at a time, and multiplied by
    the library.
    """
    b, h, n, _ = q.shape
    h_kv = k.shape[1]
    deterministic = torch.are_deterministic_algorithms_enabled()
    with _on(q.device):
        call, stops = _with_live_keys(_prepare(q, k, v, starts, thresholds, selection_head, carries))
        q, k, v, out, d_out = call.q, call.k, call.v, _readable(out), _readable(d_out)
        wide_q, wide_k, wide_v = (_padded(x) for x in (d_q, d_k, d_v))
        d = q.shape[3]
        tau = 1.0 if memory_tau is None else memory_tau
        delta = torch.empty_like(lse)
        delta_kernel[(b * h * call.n_blocks,)](
            out, d_out, delta, n, h, *call.strides(out, d_out),
            HEAD_DIM=d, BLOCK_D=config.head_block(d), BLOCK_M=call.tiles.queries,
        )  # fmt: skip

        slots = h_kv if deterministic else 1
        sums = torch.zeros(b, slots, call.n_lines, n, dtype=torch.float32, device=q.device)
        if d_memory is None:
            scaled_d_memory = torch.zeros(b, n, dtype=torch.float32, device=q.device)
        else:
            scaled_d_memory = (d_memory.float() / tau).contiguous()
            memory_gradient_kernel[(b * call.n_lines,)](
                *call.selection, scaled_d_memory, sums, carries, call.starts, *call.live,
                call.scale, tau * LOG2_E, n, *call.selection_strides, sums.stride(0), **call.options(call.tiles.carry),
            )  # fmt: skip

        d_qs = torch.zeros(b, n, d, dtype=torch.float32, device=q.device)
        d_ks = torch.empty_like(d_qs)
        launch = call.tiles.key_gradient
        key_gradient_kernel[(b * h_kv * triton.cdiv(n, launch.keys),)](
            q, k, v, *call.selection, d_out, lse, delta, wide_k, wide_v, d_ks, sums, carries, call.starts, stops,
            _order(call, stops), call.scale, call.d_scale, n, h, call.group, selection_head // call.group,
            *call.strides(q, k, v, d_out, wide_k), sums.stride(0), sums.stride(1) if slots > 1 else 0,
            **call.options(launch),
        )  # fmt: skip

        later = sums.sum(1, keepdim=True) if slots > 1 else sums
        later_kernel[(b * triton.cdiv(n, COLUMNS),)](
            later, n, later.stride(0), BLOCK_M=call.tiles.line, BLOCK_N=COLUMNS
        )
        _selection_gradient(call, d_out, lse, delta, scaled_d_memory, later, tau, d_qs, d_ks, deterministic)
        wide_k[:, selection_head // call.group] = d_ks

        launch = call.tiles.query_gradient
        heads = call.heads(launch)
        query_gradient_kernel[(b * (h // heads) * call.n_blocks,)](
            q, k, v, *call.selection, d_out, lse, delta, wide_q, d_qs, carries, call.starts, *call.live,
            call.scale, call.d_scale, n, h, call.group, selection_head, *call.strides(q, k, v, d_out, wide_q),
            HEADS=heads, **call.options(launch),
        )  # fmt: skip
        for wide, grad in ((wide_q, d_q), (wide_k, d_k), (wide_v, d_v)):
            _unpad(wide, grad)


def _selection_gradient(call, d_out, lse, delta, d_memory, later, tau, d_qs, d_ks, deterministic) -> None:
    """Add to d_qs and d_ks [b, n, d] what the gradient of F gives the selection head."""
    b, h, n, d = call.q.shape
    launch, line = call.tiles.selection_gradient, call.tiles.line
    rows = call.tiles.queries if launch.blocks else line
    n_parts = triton.cdiv(n, rows)
    chunk = max(1, STORED_NUMBERS // (b * n * rows)) if deterministic else n_parts
    for first in range(0, n_parts * rows, chunk * rows):
        n_row_tiles = min(chunk, n_parts - first // rows)
        last = min(first + n_row_tiles * rows, n)
        n_key_tiles = triton.cdiv(last, launch.keys)
        shape = (b, n_row_tiles * rows, n) if deterministic else (1,)
        d_S = torch.zeros(shape, dtype=torch.float32, device=d_qs.device)
        selection_gradient_kernel[(b * n_row_tiles * n_key_tiles,)](
            call.q, call.k, call.v, *call.selection, d_out, lse, delta, d_memory, later, d_qs, d_ks, d_S,
            call.carries, call.starts, *call.live, call.scale, call.d_scale, tau * LOG2_E, n, h, call.group,
            first, n_row_tiles, n_key_tiles, *call.strides(call.q, call.k, call.v, d_out), later.stride(0),
            TILE_LINES=rows // line, STORE=deterministic, **call.options(launch),
        )  # fmt: skip
        if deterministic:
            q_s, k_s = (x.float() for x in call.selection)
            d_S = d_S[:, : last - first]
            d_qs[:, first:last] = d_S @ k_s
            d_ks += d_S.mT @ q_s[:, first:last]


def _prepare(q, k, v, starts, thresholds, selection_head, carries) -> _Call:
    b, h, n, d = q.shape
    if starts is None:
        starts = torch.zeros(b, n, dtype=torch.int32, device=q.device)
    if thresholds is not None:
        thresholds = (thresholds * LOG2_E).contiguous()
    tiles = config.tiles_for(q)
    q, k, v = (_readable(x) for x in (q, k, v))
    return _Call(q, k, v, starts, carries, thresholds, (starts, starts), tiles, selection_head, d**-0.5)


def _with_live_keys(call: _Call) -> tuple[_Call, Tensor]:
    """The call with its lists of live keys, and stops [b, n] int32: one past the last block that looks at a key."""
    b, h, n, d = call.q.shape
    if call.thresholds is None:
        ends = document_ends(call.starts)
        return call, (ends + call.tiles.queries - 1) // call.tiles.queries
    live = torch.empty(b, call.n_blocks, n, dtype=torch.int32, device=call.q.device)
    counts = torch.empty(b, call.n_blocks, dtype=torch.int32, device=call.q.device)
    stops = torch.zeros(b, n, dtype=torch.int32, device=call.q.device)
    live_kernel[(b * call.n_blocks,)](
        call.carries, call.starts, call.thresholds, live, counts, stops, n,
        BLOCK_M=call.tiles.queries, BLOCK_N=COLUMNS, LINES=call.tiles.queries // call.tiles.line,
    )  # fmt: skip
    return replace(call, live=(live, counts)), stops


def document_ends(starts: Tensor) -> Tensor:
    """One past the last token of each token's document. starts [b, n] int32, ascending; returns [b, n] int32."""
    n = starts.shape[1]
    return torch.searchsorted(starts.contiguous(), starts.contiguous(), right=True, out_int32=True).clamp_(max=n)


def _order(call: _Call, stops: Tensor) -> Tensor:
    """The order in which the key pass takes the keys, [b, n] int32, where keys die; else a placeholder.

    A tile of keys is looked at until its last key is dead, so keys are put together by the logarithm of their
    lifetime, and by position within that.
    """
    if call.thresholds is None:
        return call.starts
    position = torch.arange(call.q.shape[2], device=stops.device)
    lifetime = stops - position // call.tiles.queries  # in blocks, at least 1
    by_class = lifetime.float().log2().to(torch.int64) * len(position) + position
    return by_class.argsort(dim=1).to(torch.int32)


def _or_placeholder(x: Tensor | None, placeholder: Tensor) -> Tensor:
    return placeholder if x is None else x


def _readable(x: Tensor) -> Tensor:
    """x [b, h, n, d] itself if kernels can read it well in place, else a copy, with zeros for missing features.

    In place: the last dimension is contiguous, heads have aligned features, and offsets in a head fit in 32 bits.
    """
    x = functional.pad(x, (0, -x.shape[3] % ALIGNED_FEATURES)) if x.shape[3] % ALIGNED_FEATURES else x
    fits = x.stride(2) * x.shape[2] < 2**31
    return x if x.stride(3) == 1 and fits else x.contiguous()


def _padded(x: Tensor) -> Tensor:
    """x [b, h, n, d], to be written, if its heads have aligned features, else a larger tensor of its layout."""
    b, h, n, d = x.shape
    missing = -d % ALIGNED_FEATURES
    return x if missing == 0 else x.new_empty(b, n, h, d + missing).transpose(1, 2)


def _unpad(wide: Tensor, x: Tensor) -> None:
    """Copy to x what kernels wrote to wide = _padded(x)."""
    if wide is not x:
        x.copy_(wide[..., : x.shape[3]])


def _on(device: torch.device):
    """Launch on that device: Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
