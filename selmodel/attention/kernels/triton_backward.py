"""The backward pass of selective attention in Triton.

With P the weights, dO the gradient of the output, delta[i] = rowsum(dO * O)[i], and per head

    dL[i,j] = P[i,j] * (dO V^T - delta)[i,j]                        the softmax's backward
    H[i,j]  = sum over heads of dL[i,j] + dM[i] / tau where F <= tau        minus the gradient of F
    dS[i',j] = -(sum of H[i,j] over i > i')          and dL of the selection head += dS where S > 0

    delta_kernel                delta
    memory_gradient_kernel      what dM adds to the sums of H over each line of queries
    key_gradient_kernel         dV = P^T dO, dK = dL^T Q / sqrt(d), and the sums of H over each line of queries
    later_kernel                g[line, j]: those sums over all later lines
    selection_gradient_kernel   H of one tile over all heads, dS = -(g + H summed inside the line), and what dS adds
                                to dQ and dK of the selection head
    query_gradient_kernel       dQ = dL K / sqrt(d), plus what the selection adds

Because g comes from sums that the key pass makes on its way, the tiles of the selection pass are independent of each
other and need not be taken from the bottom up.
"""

# Triton has no (*tuple, item).
# ruff: noqa: RUF005
from __future__ import annotations

import triton
import triton.language as tl

from selmodel.attention.kernels.triton_forward import SIZES
from selmodel.attention.kernels.triton_tiles import (
    NO_KEY,
    attended,
    edge_tile,
    full_tiles,
    live_columns,
    load_rows,
    selection_tile,
    store_rows,
    votes_tile,
)


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    Out, dOut, Delta, n, h,
    out_stride_b, out_stride_h, out_stride_n, grad_stride_b, grad_stride_h, grad_stride_n,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Delta [b, h, n] = rowsum(dOut * Out), float32. Grid: b * h * blocks."""
    n_blocks = tl.cdiv(n, BLOCK_M)
    rows = tl.program_id(0) % n_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    head = (tl.program_id(0) // n_blocks).to(tl.int64)  # batch * h + head
    out_base = Out + head // h * out_stride_b + head % h * out_stride_h
    grad_base = dOut + head // h * grad_stride_b + head % h * grad_stride_h
    out = load_rows(out_base, rows, out_stride_n, n, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    grad = load_rows(grad_base, rows, grad_stride_n, n, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    tl.store(Delta + head * n + rows, tl.sum(out * grad, axis=1), mask=rows < n)


@triton.jit(do_not_specialize=SIZES)
def memory_gradient_kernel(
    Qs, Ks, dMemory, Sums, Carries, Starts, Live, LiveCounts,
    scale, tau, n, query_stride_b, query_stride_n, key_stride_b, key_stride_n, sums_stride_b,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LINES: tl.constexpr, LIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums [b, lines, n] = sum over the line's rows of dMemory[i] / tau where F[i,j] <= tau and i attends to j.

    tau in units of ln 2, dMemory [b, n] float32 already divided by tau. Keys that no row attends to are not written.
    Grid: b * lines.
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
    grad = tl.load(dMemory + batch * n + rows, mask=rows < n, other=0.0)
    q_before = load_rows(Qs + batch * query_stride_b, rows - 1, query_stride_n, n, HEAD_DIM, BLOCK_D, True)
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
        counted = attended(rows, columns, starts, False) & (F <= tau)
        total = tl.sum(tl.where(counted, grad[:, None], 0.0), axis=0)
        tl.store(Sums + batch * sums_stride_b + tl.cast(line, tl.int64) * n + columns, total, mask=columns < n)


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(
    Q, K, V, Qs, Ks, dOut, Lse, Delta, dK, dV, dKs, Sums, Carries, Starts, Stops, Order,
    scale, d_scale, n, h, kv_group, selection_kv_head,
    query_stride_b, query_stride_h, query_stride_n, key_stride_b, key_stride_h, key_stride_n,
    value_stride_b, value_stride_h, value_stride_n, grad_stride_b, grad_stride_h, grad_stride_n,
    key_grad_stride_b, key_grad_stride_h, key_grad_stride_n, sums_stride_b, sums_stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LINES: tl.constexpr, LIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV [b, h_kv, n, d] (one set of strides for both), and dL summed over each line of queries into Sums.

    dK of the selection head's key head goes, unrounded, to dKs [b, n, d] float32, to which the selection adds later.
    d_scale = 1 / sqrt(d). Sums [b, slots, lines, n]: key heads share one slot where sums_stride_h is 0. A tile of
    keys looks at blocks of queries up to the last of its keys' Stops [b, n]. With LIVE, tiles take their keys in
    Order [b, n], so that keys that die early stand together. Grid: b * h_kv * tiles. Tiles are [key, query].
    """
    n_lines = tl.cdiv(n, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    kv_heads = h // kv_group
    part = tl.program_id(0) // n_tiles
    batch = (part // kv_heads).to(tl.int64)
    kv_head = (part % kv_heads).to(tl.int64)
    columns = tl.program_id(0) % n_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    if LIVE:
        columns = tl.load(Order + batch * n + columns, mask=columns < n, other=NO_KEY)
    stops = tl.load(Stops + batch * n + columns, mask=columns < n, other=0)
    begin = tl.min(columns, axis=0) // BLOCK_M
    end = tl.minimum(tl.max(stops, axis=0) * LINES, n_lines)
    k = load_rows(K + batch * key_stride_b + kv_head * key_stride_h, columns, key_stride_n, n, HEAD_DIM, BLOCK_D, True)
    v = load_rows(
        V + batch * value_stride_b + kv_head * value_stride_h, columns, value_stride_n, n, HEAD_DIM, BLOCK_D, True
    )
    k_selection = load_rows(Ks + batch * key_stride_b, columns, key_stride_n, n, HEAD_DIM, BLOCK_D, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    Qs += batch * query_stride_b
    Starts += batch * n
    carries = Carries + batch * n_lines * n + columns
    sums = Sums + batch * sums_stride_b + kv_head * sums_stride_h + columns
    for x in range(0, kv_group):
        head = kv_head * kv_group + x
        queries = Q + batch * query_stride_b + head * query_stride_h
        grads = dOut + batch * grad_stride_b + head * grad_stride_h
        for line in range(begin, end):
            first = line * BLOCK_M
            rows = first + tl.arange(0, BLOCK_M)
            starts = tl.load(Starts + rows, mask=rows < n, other=0)
            # A tile goes on as long as one of its keys lives: for others, F is infinite, and the weight 0.
            alive = (line < stops * LINES) if LIVE else (columns < n)
            carry = tl.load(carries + tl.cast(line, tl.int64) * n, mask=alive, other=float("inf"))
            q_before = load_rows(Qs, rows - 1, query_stride_n, n, HEAD_DIM, BLOCK_D, True)
            F = votes_tile(q_before, k_selection, carry, scale, rows, columns, starts, first, True, True, PRECISION)
            lse = tl.load(Lse + (batch * h + head) * n + rows, mask=rows < n, other=float("inf"))
            delta = tl.load(Delta + (batch * h + head) * n + rows, mask=rows < n, other=0.0)
            q = load_rows(queries, rows, query_stride_n, n, HEAD_DIM, BLOCK_D, True)
            logits = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - F
            logits = tl.where(attended(rows, columns, starts, True), logits, -float("inf"))
            P = tl.exp2(logits - lse[None, :])
            grad = load_rows(grads, rows, grad_stride_n, n, HEAD_DIM, BLOCK_D, True)
            dv = tl.dot(P.to(grad.dtype), grad, dv, input_precision=PRECISION)
            d_logits = P * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
            dk = tl.dot(d_logits.to(q.dtype), q, dk, input_precision=PRECISION)
            total = tl.sum(d_logits, axis=1)
            tl.atomic_add(sums + tl.cast(line, tl.int64) * n, total, mask=columns < n, sem="relaxed")
    base = batch * key_grad_stride_b + kv_head * key_grad_stride_h
    store_rows(dV + base, columns, key_grad_stride_n, n, dv, HEAD_DIM, BLOCK_D)
    if kv_head == selection_kv_head:
        store_rows(dKs + batch * n * HEAD_DIM, columns, HEAD_DIM, n, dk * d_scale, HEAD_DIM, BLOCK_D)
    else:
        store_rows(dK + base, columns, key_grad_stride_n, n, dk * d_scale, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def later_kernel(Sums, n, sums_stride_b, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sums [b, lines, n], in place: each line's sums give way to those of all later lines. Grid: b * tiles."""
    n_lines = tl.cdiv(n, BLOCK_M)
    n_tiles = tl.cdiv(n, BLOCK_N)
    batch = (tl.program_id(0) // n_tiles).to(tl.int64)
    columns = tl.program_id(0) % n_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = Sums + batch * sums_stride_b + columns
    later = tl.zeros([BLOCK_N], tl.float32)
    for index in range(0, n_lines):
        pointers = sums + tl.cast(n_lines - 1 - index, tl.int64) * n
        own = tl.load(pointers, mask=columns < n, other=0.0)
        tl.store(pointers, later, mask=columns < n)
        later += own


@triton.jit(do_not_specialize=SIZES)
def selection_gradient_kernel(
    Q, K, V, Qs, Ks, dOut, Lse, Delta, dMemory, Later, dQs, dKs, dS, Carries, Starts, Live, LiveCounts,
    scale, d_scale, tau, n, h, kv_group, first_row, n_row_tiles, n_key_tiles,
    query_stride_b, query_stride_h, query_stride_n, key_stride_b, key_stride_h, key_stride_n,
    value_stride_b, value_stride_h, value_stride_n, grad_stride_b, grad_stride_h, grad_stride_n, later_stride_b,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE_LINES: tl.constexpr, LINES: tl.constexpr, LIVE: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the gradient of F adds to the queries (dQs) and keys (dKs) of the selection head: [b, n, d] float32.

    dMemory [b, n] float32, divided by tau (zeros without a memory term; tau in units of ln 2). Later: see
    `later_kernel`. A program takes one tile: TILE_LINES lines of queries, of the n_row_tiles times as many that begin
    at first_row, and BLOCK_N keys. Programs meet in dQs and dKs by atomic additions, in no fixed order. With STORE,
    dS [b, n_row_tiles * BLOCK_M, n] (zeros at first) is written instead, scaled by 1 / sqrt(d), and the caller
    multiplies. Grid: b * n_row_tiles * n_key_tiles. Tiles are [key, query].
    """
    LINE: tl.constexpr = BLOCK_M // TILE_LINES
    n_lines = tl.cdiv(n, LINE)
    key_tile = tl.program_id(0) % n_key_tiles
    row_tile = n_row_tiles - 1 - tl.program_id(0) // n_key_tiles % n_row_tiles
    batch = (tl.program_id(0) // n_key_tiles // n_row_tiles).to(tl.int64)
    first = first_row + row_tile * BLOCK_M
    last = tl.minimum(first + BLOCK_M, n) - 1
    at = batch * tl.cdiv(n, LINE * LINES) + first // (LINE * LINES)  # of the block's list of live keys
    Starts += batch * n
    if LIVE:
        start = key_tile * BLOCK_N
        end = tl.load(LiveCounts + at)
    else:
        start = (tl.load(Starts + first) // BLOCK_N + key_tile) * BLOCK_N
        end = last + 1
    if start >= end:
        return

    rows = first + tl.arange(0, BLOCK_M)
    if LIVE:
        columns = live_columns(Live + at * n, end, start, BLOCK_N)
    else:
        columns = start + tl.arange(0, BLOCK_N)
    Q += batch * query_stride_b
    K += batch * key_stride_b
    V += batch * value_stride_b
    Qs += batch * query_stride_b
    dOut += batch * grad_stride_b
    starts = tl.load(Starts + rows, mask=rows < n, other=0)
    d_memory = tl.load(dMemory + batch * n + rows, mask=rows < n, other=0.0)
    carry = tl.load(Carries + (batch * n_lines + first // LINE) * n + columns, mask=columns < n, other=0.0)
    k_selection = load_rows(Ks + batch * key_stride_b, columns, key_stride_n, n, HEAD_DIM, BLOCK_D, True)
    q_before = load_rows(Qs, rows - 1, query_stride_n, n, HEAD_DIM, BLOCK_D, True)
    F = votes_tile(q_before, k_selection, carry, scale, rows, columns, starts, first, True, True, PRECISION)
    keep = attended(rows, columns, starts, True)
    H = tl.where(keep & (F <= tau), d_memory[None, :], 0.0)
    F = tl.where(keep, F, float("inf"))  # weight 0
    for head in range(0, h):
        kv_head = tl.cast(head // kv_group, tl.int64)
        query_at = tl.cast(head, tl.int64)
        q = load_rows(Q + query_at * query_stride_h, rows, query_stride_n, n, HEAD_DIM, BLOCK_D, True)
        k = load_rows(K + kv_head * key_stride_h, columns, key_stride_n, n, HEAD_DIM, BLOCK_D, True)
        grad = load_rows(dOut + query_at * grad_stride_h, rows, grad_stride_n, n, HEAD_DIM, BLOCK_D, True)
        v = load_rows(V + kv_head * value_stride_h, columns, value_stride_n, n, HEAD_DIM, BLOCK_D, True)
        lse = tl.load(Lse + (batch * h + head) * n + rows, mask=rows < n, other=float("inf"))
        delta = tl.load(Delta + (batch * h + head) * n + rows, mask=rows < n, other=0.0)
        P = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - F - lse[None, :])
        H += P * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])

    q = load_rows(Qs, rows, query_stride_n, n, HEAD_DIM, BLOCK_D, True)
    S = selection_tile(q, k_selection, scale, rows, columns, starts, 0, True, True, PRECISION)
    later_at = Later + batch * later_stride_b + tl.cast(last // LINE, tl.int64) * n
    later = tl.load(later_at + columns, mask=columns < n, other=0.0)
    after = tl.cumsum(H, axis=1, reverse=True) - H
    # A NaN in S must reach the gradients; S > 0 would drop it.
    grad_S = tl.where(S == 0, 0.0, -(later[:, None] + after)) * d_scale
    if STORE:
        pointers = dS + (batch * n_row_tiles * BLOCK_M + row_tile * BLOCK_M + tl.arange(0, BLOCK_M))[None, :] * n
        mask = (columns < n)[:, None] & (rows < n)[None, :]
        tl.store(pointers + columns[:, None], grad_S, mask=mask)
    else:
        # Sums over heads and later queries can leave the range of float16: they are brought to at most 1.
        size = 1.0
        if q.dtype == tl.float16:
            largest = tl.max(tl.abs(grad_S))
            size = tl.where(largest > 0, largest, 1.0)
        operand = (grad_S / size).to(q.dtype)
        features = tl.arange(0, BLOCK_D)
        has_feature = (features < HEAD_DIM)[None, :]
        dk = tl.dot(operand, q, input_precision=PRECISION) * size
        pointers = dKs + batch * n * HEAD_DIM + ((columns * HEAD_DIM)[:, None] + features[None, :])
        tl.atomic_add(pointers, dk, mask=(columns < n)[:, None] & has_feature, sem="relaxed")
        dq = tl.dot(tl.trans(operand), k_selection, input_precision=PRECISION) * size
        pointers = dQs + batch * n * HEAD_DIM + ((rows * HEAD_DIM)[:, None] + features[None, :])
        tl.atomic_add(pointers, dq, mask=(rows < n)[:, None] & has_feature, sem="relaxed")


@triton.jit
def query_gradient_tile(
    Ks, K, V, dq, queries, grads, lse, delta, q_before, carries, columns, rows, starts, first,
    scale, n, head, kv_group, key_stride_h, key_stride_n, value_stride_h, value_stride_n,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dq, a tuple over heads. Tiles are [query, key]."""
    k_selection = load_rows(Ks, columns, key_stride_n, n, HEAD_DIM, BLOCK_D, MASKED)
    if MASKED:
        carry = tl.load(carries + columns, mask=columns < n, other=0.0)
    else:
        carry = tl.load(carries + columns)
    F = votes_tile(q_before, k_selection, carry, scale, rows, columns, starts, first, MASKED, False, PRECISION)
    new_dq = ()
    for x in tl.static_range(HEADS):
        kv_head = tl.cast((head + x) // kv_group, tl.int64)
        k = load_rows(K + kv_head * key_stride_h, columns, key_stride_n, n, HEAD_DIM, BLOCK_D, MASKED)
        v = load_rows(V + kv_head * value_stride_h, columns, value_stride_n, n, HEAD_DIM, BLOCK_D, MASKED)
        logits = tl.dot(queries[x], tl.trans(k), input_precision=PRECISION) * scale - F
        if MASKED:
            logits = tl.where(attended(rows, columns, starts, False), logits, -float("inf"))
        P = tl.exp2(logits - lse[x][:, None])
        d_logits = P * (tl.dot(grads[x], tl.trans(v), input_precision=PRECISION) - delta[x][:, None])
        new_dq = new_dq + (tl.dot(d_logits.to(k.dtype), k, dq[x], input_precision=PRECISION),)
    return new_dq


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(
    Q, K, V, Qs, Ks, dOut, Lse, Delta, dQ, dQs, Carries, Starts, Live, LiveCounts,
    scale, d_scale, n, h, kv_group, selection_head,
    query_stride_b, query_stride_h, query_stride_n, key_stride_b, key_stride_h, key_stride_n,
    value_stride_b, value_stride_h, value_stride_n, grad_stride_b, grad_stride_h, grad_stride_n,
    query_grad_stride_b, query_grad_stride_h, query_grad_stride_n,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LINES: tl.constexpr, HEADS: tl.constexpr, LIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ [b, h, n, d], with dQs [b, n, d] float32 added to that of the selection head. Grid as `forward_kernel`."""
    n_blocks = tl.cdiv(n, BLOCK_M)
    block = n_blocks - 1 - tl.program_id(0) % n_blocks
    part = tl.program_id(0) // n_blocks
    batch = (part // (h // HEADS)).to(tl.int64)
    head = part % (h // HEADS) * HEADS
    first = block * BLOCK_M
    last = tl.minimum(first + BLOCK_M, n) - 1
    rows = first + tl.arange(0, BLOCK_M)
    at = batch * n_blocks + block
    K += batch * key_stride_b
    V += batch * value_stride_b
    Ks += batch * key_stride_b
    Starts += batch * n
    carries = Carries + (batch * tl.cdiv(n, BLOCK_M // LINES) + block * LINES) * n
    starts = tl.load(Starts + rows, mask=rows < n, other=0)
    q_before = load_rows(Qs + batch * query_stride_b, rows - 1, query_stride_n, n, HEAD_DIM, BLOCK_D, True)
    queries = ()
    grads = ()
    lse = ()
    delta = ()
    dq = ()
    for x in tl.static_range(HEADS):
        query_at = tl.cast(head + x, tl.int64)
        query_base = Q + batch * query_stride_b + query_at * query_stride_h
        grad_base = dOut + batch * grad_stride_b + query_at * grad_stride_h
        queries = queries + (load_rows(query_base, rows, query_stride_n, n, HEAD_DIM, BLOCK_D, True),)
        grads = grads + (load_rows(grad_base, rows, grad_stride_n, n, HEAD_DIM, BLOCK_D, True),)
        row_at = (batch * h + head + x) * n + rows
        lse = lse + (tl.load(Lse + row_at, mask=rows < n, other=float("inf")),)
        delta = delta + (tl.load(Delta + row_at, mask=rows < n, other=0.0),)
        dq = dq + (tl.zeros([BLOCK_M, BLOCK_D], tl.float32),)

    if LIVE:
        count = tl.load(LiveCounts + at)
        for start in range(0, count, BLOCK_N):
            columns = live_columns(Live + at * n, count, start, BLOCK_N)
            dq = query_gradient_tile(
                Ks, K, V, dq, queries, grads, lse, delta, q_before, carries, columns, rows, starts, first,
                scale, n, head, kv_group, key_stride_h, key_stride_n, value_stride_h, value_stride_n,
                HEAD_DIM, BLOCK_D, HEADS, True, PRECISION,
            )  # fmt: skip
    else:
        low, middle, diagonal = full_tiles(Starts, first, last, BLOCK_N)
        n_edge = (middle - low) // BLOCK_N + tl.cdiv(last + 1 - diagonal, BLOCK_N)
        for index in range(0, n_edge):
            columns = edge_tile(index, low, middle, diagonal, BLOCK_N) + tl.arange(0, BLOCK_N)
            dq = query_gradient_tile(
                Ks, K, V, dq, queries, grads, lse, delta, q_before, carries, columns, rows, starts, first,
                scale, n, head, kv_group, key_stride_h, key_stride_n, value_stride_h, value_stride_n,
                HEAD_DIM, BLOCK_D, HEADS, True, PRECISION,
            )  # fmt: skip
        for start in range(middle, diagonal, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            dq = query_gradient_tile(
                Ks, K, V, dq, queries, grads, lse, delta, q_before, carries, columns, rows, starts, first,
                scale, n, head, kv_group, key_stride_h, key_stride_n, value_stride_h, value_stride_n,
                HEAD_DIM, BLOCK_D, HEADS, False, PRECISION,
            )  # fmt: skip

    for x in tl.static_range(HEADS):
        grad = dq[x] * d_scale
        if head + x == selection_head:
            grad += load_rows(dQs + batch * n * HEAD_DIM, rows, HEAD_DIM, n, HEAD_DIM, BLOCK_D, True)
        base = dQ + batch * query_grad_stride_b + tl.cast(head + x, tl.int64) * query_grad_stride_h
        store_rows(base, rows, query_grad_stride_n, n, grad, HEAD_DIM, BLOCK_D)
