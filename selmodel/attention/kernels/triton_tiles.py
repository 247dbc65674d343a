"""What the Triton kernels of selective attention share: loading rows, F of a tile, the pairs that a tile keeps.

A tile pairs a block of queries with some keys. It is laid out [query, key] where a program owns the queries, and
[key, query] where it owns the keys, so that the weights can be the left operand of the product that follows.
(No function here returns from within an `if`: triton would compile what follows as well.)

Documents are given by `starts` [b, n]: the position of the first token of each token's document; zeros without
documents. Since documents are adjacent, query i and key j <= i are of one document exactly when j >= starts[i], and
query i may vote on key j < i exactly when j > starts[i]: <BOS> and the first token of a document are spared.

Logits, F, carries and log-sum-exps are in units of ln 2 (exp2 is one instruction): `scale` is log2(e) / sqrt(d).
"""

from __future__ import annotations

import triton
import triton.language as tl

# The position of the key that fills up a list of live keys: later than every query, so that none attends to it.
NO_KEY = tl.constexpr(1 << 30)


@triton.jit
def load_rows(base, rows, stride, n, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHECKED: tl.constexpr):
    """Rows of one head, [len(rows), BLOCK_D]; 0 outside 0 .. n - 1 (if CHECKED) and from HEAD_DIM on.

    Offsets within a head have 32 bits, which saves registers; `triton_launch` sees to it that they suffice.
    """
    features = tl.arange(0, BLOCK_D)
    pointers = base + (rows * stride)[:, None] + features[None, :]
    if CHECKED:
        mask = ((rows >= 0) & (rows < n))[:, None]
        if HEAD_DIM < BLOCK_D:
            mask = mask & (features < HEAD_DIM)[None, :]
        values = tl.load(pointers, mask=mask, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        values = tl.load(pointers, mask=(features < HEAD_DIM)[None, :], other=0.0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def store_rows(base, rows, stride, n, values, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store values [len(rows), BLOCK_D] in the rows of one head, in the type of `base`. Offsets have 64 bits."""
    features = tl.arange(0, BLOCK_D)
    mask = (rows < n)[:, None] & (features < HEAD_DIM)[None, :]
    pointers = base + (rows.to(tl.int64) * stride)[:, None] + features[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def selection_tile(
    q, k, scale, rows, columns, starts, first, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr
):
    """S [query, key], or [key, query] if TRANSPOSED: the votes of `rows` on `columns`.

    q, k: tiles of the selection head. starts: of `rows`. Rows before `first` do not vote. Without MASKED, every
    vote of the tile is allowed. A NaN or infinity in a logit stays one.
    """
    if TRANSPOSED:
        S = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        i = rows[None, :]
        j = columns[:, None]
        start = starts[None, :]
    else:
        S = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        i = rows[:, None]
        j = columns[None, :]
        start = starts[:, None]
    refused = (S < 0) | (i < first)  # a comparison with NaN is false
    if MASKED:
        refused = refused | (j >= i) | (j <= start)
    return tl.where(refused, 0.0, S)


@triton.jit
def votes_tile(
    q_before, k, carry, scale, rows, columns, starts, first,
    MASKED: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """F [query, key], or [key, query] if TRANSPOSED, for the block of queries `rows` that begins at `first`.

    carry [key]: F at the row `first`. q_before: the queries of `rows` - 1, so that row i of the tile of S is the last
    vote that F[i] counts, and an inclusive sum over the tile is F itself. Subtracting S from an inclusive sum would
    round, and turn infinity into NaN. starts: of `rows`, not of the row before. They differ at the first row of a
    document, for keys of the document before, to which neither this row nor a later one attends.
    """
    S = selection_tile(q_before, k, scale, rows - 1, columns, starts, first, MASKED, TRANSPOSED, PRECISION)
    if TRANSPOSED:
        F = carry[:, None] + tl.cumsum(S, axis=1)
    else:
        F = carry[None, :] + tl.cumsum(S, axis=0)
    return F


@triton.jit
def attended(rows, columns, starts, TRANSPOSED: tl.constexpr):
    """True where query i may attend to key j; false for rows from n on. [query, key] or [key, query]."""
    if TRANSPOSED:
        i = rows[None, :]
        j = columns[:, None]
        start = starts[None, :]
    else:
        i = rows[:, None]
        j = columns[None, :]
        start = starts[:, None]
    return (j <= i) & (j >= start)


@triton.jit
def live_columns(live, count, at, BLOCK_N: tl.constexpr):
    """Positions `at` .. `at` + BLOCK_N - 1 of a list of `count` keys; NO_KEY past its end."""
    index = at + tl.arange(0, BLOCK_N)
    return tl.load(live + index, mask=index < count, other=NO_KEY)


@triton.jit
def full_tiles(starts, first, last, BLOCK_N: tl.constexpr):
    """Where the tiles of a block of queries, first .. last, need no mask, when keys are taken in order.

    starts: of this sequence. Returns low, middle, diagonal, multiples of BLOCK_N: tiles before `low` hold other
    documents only, those from `middle` to before `diagonal` need no mask, and others up to `last` need one.
    """
    low = tl.load(starts + first) // BLOCK_N * BLOCK_N
    diagonal = first // BLOCK_N * BLOCK_N
    middle = (tl.load(starts + last) // BLOCK_N + 1) * BLOCK_N
    return low, tl.minimum(middle, diagonal), diagonal


@triton.jit
def edge_tile(index, low, middle, diagonal, BLOCK_N: tl.constexpr):
    """The first key of the index-th of the tiles that need a mask; see `full_tiles`."""
    n_low = (middle - low) // BLOCK_N
    return tl.where(index < n_low, low + index * BLOCK_N, diagonal + (index - n_low) * BLOCK_N)
