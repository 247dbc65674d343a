"""The forward pass of selective attention in Triton.

    carry_kernel     c[line, j] = F[first row of the line, j], running down the queries of the selection head
    live_kernel      for each block of queries, the keys that are not dead (see `selmodel.attention.live`)
    forward_kernel   flash attention on L - F; a program owns a block of queries of one head or more, which share F
    memory_kernel    the memory term M

Queries come in blocks, and blocks in LINES lines. Between kernels, F is kept only as c, the carries: one line of n
numbers for each line of queries. The tiles of F are computed again from c and the logits of the selection head
wherever they are needed, which costs one matrix product and a cumulative sum. Forward pass and gradient of q work on
blocks, all else on lines, whose tiles leave room in the registers for what else those kernels hold.
"""

# Triton has no (*tuple, item).
# ruff: noqa: RUF005
from __future__ import annotations

import triton
import triton.language as tl

from selmodel.attention.kernels.triton_tiles import (
    attended,
    edge_tile,
    full_tiles,
    live_columns,
    load_rows,
    selection_tile,
    store_rows,
    votes_tile,
)

# No variant for a size that is 1 or a multiple of 16: it would gain nothing, and n changes at every step of decoding.
SIZES = ("n", "h", "kv_group", "first_row", "n_row_tiles", "n_key_tiles", "selection_head", "selection_kv_head")


@triton.jit(do_not_specialize=SIZES)
def carry_kernel(
    Qs, Ks, Carries, Starts, Thresholds,
    scale, n, query_stride_b, query_stride_n, key_stride_b, key_stride_n,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LINES: tl.constexpr, LIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carries [b, lines, n] of the keys up to each line's last row; what is later stays unwritten.

    Qs, Ks: queries and keys of the selection head. With LIVE, a key is dead once its carry has reached
    Thresholds [b, n] at the first line of a block; what it gets later does not matter, and a program stops counting
    once all its keys are dead. Grid: b * tiles of keys.
    """
    n_lines = tl.cdiv(n, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    batch = (tl.program_id(0) // n_tiles).to(tl.int64)
    first_key = tl.program_id(0) % n_tiles * BLOCK_N
    columns = first_key + tl.arange(0, BLOCK_N)
    in_range = columns < n
    Qs += batch * query_stride_b
    Starts += batch * n
    carries = Carries + batch * n_lines * n + columns
    k = load_rows(Ks + batch * key_stride_b, columns, key_stride_n, n, HEAD_DIM, BLOCK_D, True)
    carry = tl.zeros([BLOCK_N], tl.float32)
    line = first_key // (BLOCK_M * LINES) * LINES
    if LIVE:
        threshold = tl.load(Thresholds + batch * n + columns, mask=in_range, other=0.0)
        any_alive = 1
        while (line < n_lines) & (any_alive > 0):
            if line % LINES == 0:
                alive = in_range & ~(carry >= threshold)  # a threshold that is NaN is never reached
                any_alive = tl.max(alive.to(tl.int32), axis=0)
            if any_alive > 0:
                tl.store(carries + tl.cast(line, tl.int64) * n, carry, mask=in_range)
                rows = line * BLOCK_M + tl.arange(0, BLOCK_M)
                starts = tl.load(Starts + rows, mask=rows < n, other=0)
                q = load_rows(Qs, rows, query_stride_n, n, HEAD_DIM, BLOCK_D, True)
                S = selection_tile(q, k, scale, rows, columns, starts, 0, True, True, PRECISION)
                carry += tl.sum(S, axis=1)
                line += 1
        for later in range(line, n_lines):
            tl.store(carries + tl.cast(later, tl.int64) * n, carry, mask=in_range)
    else:
        for current in range(line, n_lines):
            tl.store(carries + tl.cast(current, tl.int64) * n, carry, mask=in_range)
            rows = current * BLOCK_M + tl.arange(0, BLOCK_M)
            starts = tl.load(Starts + rows, mask=rows < n, other=0)
            q = load_rows(Qs, rows, query_stride_n, n, HEAD_DIM, BLOCK_D, True)
            S = selection_tile(q, k, scale, rows, columns, starts, 0, True, True, PRECISION)
            carry += tl.sum(S, axis=1)


@triton.jit(do_not_specialize=SIZES)
def live_kernel(
    Carries, Starts, Thresholds, Live, LiveCounts, Stops, n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Live [b, blocks, n], int32: the live keys of each block, in order; LiveCounts [b, blocks]: how many.

    A block has BLOCK_M queries in LINES lines. A key is live for a block that does not end before it or begin in a
    later document, while its carry at the block's first line has not reached Thresholds [b, n]. Stops [b, n], zeros
    at first: one past the last block for which a key is live. Grid: b * blocks.
    """
    n_blocks = tl.cdiv(n, BLOCK_M)
    at = tl.program_id(0).to(tl.int64)  # batch * n_blocks + block
    batch = at // n_blocks
    block = (at % n_blocks).to(tl.int32)
    end = tl.minimum((block + 1) * BLOCK_M, n)
    start = tl.load(Starts + batch * n + block * BLOCK_M)
    carries = Carries + (batch * tl.cdiv(n, BLOCK_M // LINES) + block * LINES) * n
    count = tl.zeros([], tl.int32)
    for first in range(start // BLOCK_N * BLOCK_N, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        candidate = (columns >= start) & (columns < end)
        carry = tl.load(carries + columns, mask=candidate, other=0.0)
        threshold = tl.load(Thresholds + batch * n + columns, mask=candidate, other=0.0)
        alive = (candidate & ~(carry >= threshold)).to(tl.int32)
        place = count + tl.cumsum(alive, axis=0) - 1
        tl.store(Live + at * n + place, columns, mask=alive > 0)
        tl.atomic_max(Stops + batch * n + columns, block + 1, mask=alive > 0)
        count += tl.sum(alive, axis=0)
    tl.store(LiveCounts + at, count)


@triton.jit
def forward_tile(
    Ks, K, V, state, queries, q_before, carries, columns, rows, starts, first,
    scale, n, head, kv_group, key_stride_h, key_stride_n, value_stride_h, value_stride_n,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the online softmax: `state` holds (output so far, largest logit, normaliser) of each head."""
    k_selection = load_rows(Ks, columns, key_stride_n, n, HEAD_DIM, BLOCK_D, MASKED)
    if MASKED:
        carry = tl.load(carries + columns, mask=columns < n, other=0.0)
    else:
        carry = tl.load(carries + columns)
    F = votes_tile(q_before, k_selection, carry, scale, rows, columns, starts, first, MASKED, False, PRECISION)
    new_state = ()
    for x in tl.static_range(HEADS):
        acc, largest, total = state[x]
        kv_head = tl.cast((head + x) // kv_group, tl.int64)
        k = load_rows(K + kv_head * key_stride_h, columns, key_stride_n, n, HEAD_DIM, BLOCK_D, MASKED)
        v = load_rows(V + kv_head * value_stride_h, columns, value_stride_n, n, HEAD_DIM, BLOCK_D, MASKED)
        logits = tl.dot(queries[x], tl.trans(k), input_precision=PRECISION) * scale - F
        if MASKED:
            logits = tl.where(attended(rows, columns, starts, False), logits, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(logits, axis=1))
        # A row may have met no key yet; -inf - -inf is NaN.
        reference = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - reference)
        P = tl.exp2(logits - reference[:, None])
        total = total * shrink + tl.sum(P, axis=1)
        acc = tl.dot(P.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        new_state = new_state + ((acc, new_largest, total),)
    return new_state


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q, K, V, Qs, Ks, Out, Lse, Carries, Starts, Live, LiveCounts,
    scale, n, h, kv_group,
    query_stride_b, query_stride_h, query_stride_n, key_stride_b, key_stride_h, key_stride_n,
    value_stride_b, value_stride_h, value_stride_n, out_stride_b, out_stride_h, out_stride_n,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LINES: tl.constexpr, HEADS: tl.constexpr, LIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Out [b, h, n, d] and Lse [b, h, n], the logarithm to base 2 of the normaliser.

    Qs, Ks: queries and keys of the selection head. A program takes a block of queries of HEADS heads side by side,
    which share the tiles of F. With LIVE, its keys are those of the block's list. Grid: b * (h / HEADS) * blocks, the
    longest rows of each head first.
    """
    n_blocks = tl.cdiv(n, BLOCK_M)
    block = n_blocks - 1 - tl.program_id(0) % n_blocks
    part = tl.program_id(0) // n_blocks
    batch = (part // (h // HEADS)).to(tl.int64)
    head = part % (h // HEADS) * HEADS
    first = block * BLOCK_M
    last = tl.minimum(first + BLOCK_M, n) - 1
    rows = first + tl.arange(0, BLOCK_M)
    at = batch * n_blocks + block

    Q += batch * query_stride_b
    K += batch * key_stride_b
    V += batch * value_stride_b
    Starts += batch * n
    carries = Carries + (batch * tl.cdiv(n, BLOCK_M // LINES) + block * LINES) * n
    Ks += batch * key_stride_b
    starts = tl.load(Starts + rows, mask=rows < n, other=0)
    q_before = load_rows(Qs + batch * query_stride_b, rows - 1, query_stride_n, n, HEAD_DIM, BLOCK_D, True)
    queries = ()
    state = ()
    for x in tl.static_range(HEADS):
        query_base = Q + tl.cast(head + x, tl.int64) * query_stride_h
        queries = queries + (load_rows(query_base, rows, query_stride_n, n, HEAD_DIM, BLOCK_D, True),)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        state = state + ((acc, tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)),)

    if LIVE:
        count = tl.load(LiveCounts + at)
        for start in range(0, count, BLOCK_N):
            columns = live_columns(Live + at * n, count, start, BLOCK_N)
            state = forward_tile(
                Ks, K, V, state, queries, q_before, carries, columns, rows, starts, first,
                scale, n, head, kv_group, key_stride_h, key_stride_n, value_stride_h, value_stride_n,
                HEAD_DIM, BLOCK_D, HEADS, True, PRECISION,
            )  # fmt: skip
    else:
        low, middle, diagonal = full_tiles(Starts, first, last, BLOCK_N)
        n_edge = (middle - low) // BLOCK_N + tl.cdiv(last + 1 - diagonal, BLOCK_N)
        for index in range(0, n_edge):
            columns = edge_tile(index, low, middle, diagonal, BLOCK_N) + tl.arange(0, BLOCK_N)
            state = forward_tile(
                Ks, K, V, state, queries, q_before, carries, columns, rows, starts, first,
                scale, n, head, kv_group, key_stride_h, key_stride_n, value_stride_h, value_stride_n,
                HEAD_DIM, BLOCK_D, HEADS, True, PRECISION,
            )  # fmt: skip
        for start in range(middle, diagonal, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            state = forward_tile(
                Ks, K, V, state, queries, q_before, carries, columns, rows, starts, first,
                scale, n, head, kv_group, key_stride_h, key_stride_n, value_stride_h, value_stride_n,
                HEAD_DIM, BLOCK_D, HEADS, False, PRECISION,
            )  # fmt: skip

    for x in tl.static_range(HEADS):
        acc, largest, total = state[x]
        out_base = Out + batch * out_stride_b + tl.cast(head + x, tl.int64) * out_stride_h
        store_rows(out_base, rows, out_stride_n, n, acc / total[:, None], HEAD_DIM, BLOCK_D)
        tl.store(Lse + (batch * h + head + x) * n + rows, largest + tl.log2(total), mask=rows < n)


@triton.jit(do_not_specialize=SIZES)
def memory_kernel(
    Qs, Ks, Memory, Carries, Starts, Live, LiveCounts,
    scale, tau, n, query_stride_b, query_stride_n, key_stride_b, key_stride_n,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LINES: tl.constexpr, LIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Memory [b, n]: M[i] = sum over the keys j <= i of i's document of 1 - min(F[i,j], tau) / tau.

    Qs, Ks: queries and keys of the selection head; tau in units of ln 2. A dead key's F is at least tau, so the lists
    of live keys hold every key that counts. Grid: b * lines.
    """
    n_lines = tl.cdiv(n, BLOCK_M)
    line = n_lines - 1 - tl.program_id(0) % n_lines
    batch = (tl.program_id(0) // n_lines).to(tl.int64)
    first = line * BLOCK_M
    last = tl.minimum(first + BLOCK_M, n) - 1
    rows = first + tl.arange(0, BLOCK_M)
    carries = Carries + (batch * n_lines + line) * n
    at = batch * tl.cdiv(n, BLOCK_M * LINES) + line // LINES  # of the block's list of live keys
    Ks += batch * key_stride_b
    Starts += batch * n
    starts = tl.load(Starts + rows, mask=rows < n, other=0)
    q_before = load_rows(Qs + batch * query_stride_b, rows - 1, query_stride_n, n, HEAD_DIM, BLOCK_D, True)
    held = tl.zeros([BLOCK_M], tl.float32)
    if LIVE:
        low = 0
        end = tl.load(LiveCounts + at)
    else:
        low = tl.load(Starts + first) // BLOCK_N * BLOCK_N
        end = last + 1
    for start in range(low, end, BLOCK_N):
        if LIVE:
            columns = live_columns(Live + at * n, end, start, BLOCK_N)
        else:
            columns = start + tl.arange(0, BLOCK_N)
        k = load_rows(Ks, columns, key_stride_n, n, HEAD_DIM, BLOCK_D, True)
        carry = tl.load(carries + columns, mask=columns < n, other=0.0)
        F = votes_tile(q_before, k, carry, scale, rows, columns, starts, first, True, False, PRECISION)
        share = tl.where(F > tau, 0.0, 1.0 - F / tau)  # a comparison with NaN is false
        held += tl.sum(tl.where(attended(rows, columns, starts, False), share, 0.0), axis=1)
    tl.store(Memory + batch * n + rows, held, mask=rows < n)
