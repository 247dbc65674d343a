"""The cache beside what `test_cache_oracle.py` shows: blocks, sinks, what is held, memory, types, and modes."""

from __future__ import annotations

import functools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from test_cache_oracle import CHUNKS, LAYERS, SELECTIVE, STANDARD, N, by_chunks, make, oracle, tokens
from test_pruning import HAND_K, HAND_LEAVES, HAND_Q, HAND_V, column, hand
from torch.profiler import ProfilerActivity, profile

from selmodel.attention import SelectiveAttention, pruning
from selmodel.attention.cache import KVCache, LayerCache
from selmodel.attention.pruning import RULES, SelectiveRule


def held_positions(layer):
    """The positions that each row of a layer holds, as sets; which slots are in use follows from `free`."""
    rows = []
    for row, positions in enumerate(layer.positions.tolist()):
        full = layer.held == layer.capacity
        used = [s for s in range(len(positions)) if (s != layer.free[row].item() if full else s < layer.held)]
        rows.append({positions[s] for s in used})
    return rows


# ---- worked by hand ----


def one_head_layer(rule, capacity):
    attention = SimpleNamespace(n_heads=1, n_kv_heads=1, head_dim=1, selection_head=0)
    return LayerCache(attention, 1, capacity, rule, dtype=torch.float64, device="cpu")


@pytest.mark.parametrize("sizes", [[1] * 8, [3, 1, 1, 3], [4, 4], [1, 7], [8]])
def test_evictions_by_hand(sizes):
    """The example of `test_pruning.py`, by steps and chunks: outputs, and after each what is held."""
    layer = one_head_layer(SelectiveRule(3), 3)
    q, k, v = (column(*x) for x in (HAND_Q, HAND_K, HAND_V))
    outs, done = [], 0
    for size in sizes:
        part = slice(done, done + size)
        outs.append(layer.attend(SelectiveAttention(1, 1, 1), q[:, :, part], k[:, :, part], v[:, :, part]))
        done += size
        assert held_positions(layer) == [{j for j in range(done) if HAND_LEAVES.get(j, 8) >= done}]
        assert (layer.length, layer.held) == (done, min(done, 3))
    torch.testing.assert_close(torch.cat(outs, 2), hand(SelectiveRule(3)).out, rtol=1e-12, atol=1e-12)


# ---- against the oracle ----


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("n_sinks", [0, 1, 30])
@pytest.mark.parametrize(
    ("attention", "rule"),
    [(SELECTIVE, x) for x in ("selective", "oldest", "h2o", "tova")] + [(STANDARD, x) for x in ("oldest", "h2o")],
)
def test_blocks_and_sinks(monkeypatch, attention, rule, n_sinks, rows):
    """Chunks of many blocks. Without sinks, and for h2o and tova, <BOS> may leave a layer whose other keys have F."""
    monkeypatch.setattr(pruning, "MIN_ROWS", rows)
    monkeypatch.setattr(pruning, "MAX_ROWS", rows)
    model, batch = make(attention), tokens(seed=3)
    draw = random.Random(f"{rule}{n_sinks}{rows}")
    for sizes in CHUNKS.values():
        budgets = [draw.randint(2, N + 3) for _ in range(LAYERS)]
        cache = KVCache(model, 2, budgets, rule=rule, n_sinks=n_sinks)
        expected = oracle(model, batch, budgets, rule, n_sinks)
        torch.testing.assert_close(by_chunks(model, cache, batch, list(sizes)), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_rows_hold_the_same_keys_however_they_came(rule):
    """Positions and F of what is held, row by row, after a chunk and after single tokens."""
    model, batch = make(), tokens(b=3)
    caches = {name: KVCache(model, 3, [4, 9, 6], rule=rule) for name in ("steps", "whole", "mixed")}
    for name, sizes in (("steps", []), ("whole", [N]), ("mixed", [7, 1, 1, 8])):
        by_chunks(model, caches[name], batch, sizes)
    different_rows = False
    for layers in zip(*(cache.layers for cache in caches.values()), strict=True):
        positions = [held_positions(layer) for layer in layers]
        assert positions[0] == positions[1] == positions[2]
        assert all(len(row) == layers[0].capacity for row in positions[0])
        different_rows |= positions[0][0] != positions[0][1]
        by_position = []
        for layer in layers:
            row = dict(zip(layer.positions[1].tolist(), layer.F[1].tolist(), strict=True))
            by_position.append([row[p] for p in sorted(held_positions(layer)[1])])
        assert by_position[0] == pytest.approx(by_position[1], rel=1e-9, abs=1e-10)
        assert by_position[0] == pytest.approx(by_position[2], rel=1e-9, abs=1e-10)
    assert different_rows or rule == "oldest"


@pytest.mark.parametrize("kind", [SELECTIVE, STANDARD])
def test_query_key_norm_and_one_key_head(kind):
    attention = functools.partial(kind, qk_norm=True)
    model, batch = make(attention), tokens()
    model = type(model)(40, attention, n_layers=2, n_heads=4, n_kv_heads=1, head_dim=6, d_model=20, context_length=N)
    model = model.double()
    rule = "selective" if kind is SELECTIVE else "tova"
    actual = by_chunks(model, KVCache(model, 2, [5, 8], rule=rule), batch, [6, 1, 1, 5])
    torch.testing.assert_close(actual, oracle(model, batch, [5, 8], rule), rtol=1e-9, atol=1e-10)


def test_a_huge_F_is_no_weight_and_no_nan():
    """Logits of thousands: F passes 1e4, and the cache equals the definition. Pruned by age, so that such keys stay."""
    model, batch = make(), tokens()
    for block in model.blocks:
        block.attention.wq.weight.data.mul_(2000)
    expected = oracle(model, batch, [N, 19, 20], "oldest")
    assert expected.isfinite().all()
    for sizes in ([], [N], [9, 1, 4]):
        cache = KVCache(model, 2, [N, 19, 20], rule="oldest")
        torch.testing.assert_close(by_chunks(model, cache, batch, list(sizes)), expected, rtol=1e-7, atol=1e-8)
        assert max(layer.F.max().item() for layer in cache.layers) > 1e4


# ---- one prompt after another ----


def test_nothing_of_a_prompt_outlives_a_reset():
    """Not even a NaN that stands in every slot."""
    model, batch = make(), tokens()
    cache = KVCache(model, 2, [4, 30, 7], rule="h2o")
    expected = by_chunks(model, cache, batch, [5])
    for layer in cache.layers:
        for x in (layer.k, layer.v, layer.F, layer.sums):
            x.fill_(math.nan)
    for sizes in ([], [5], [N]):
        cache.reset()
        assert cache.length == 0
        torch.testing.assert_close(by_chunks(model, cache, batch, sizes), expected, rtol=1e-9, atol=1e-10)


# ---- memory ----


@pytest.mark.parametrize(("attention", "rule"), [(SELECTIVE, "selective"), (SELECTIVE, "h2o"), (STANDARD, "oldest"),
                                                 (SELECTIVE, None), (STANDARD, None)])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bytes_by_formula_and_by_the_allocator(attention, rule, dtype):
    """Per slot: keys and values of 2 heads of 6; F and sums, float32 at least; ages, int32. And a few constants."""
    model = make(attention, dtype=dtype)
    budgets = None if rule is None else [5, 100, 2]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        cache = KVCache(model, 3, budgets, rule=rule)
    slots = [N + 1] * 3 if rule is None else [6, N + 1, 3]
    wide = max(4, dtype.itemsize)
    per_slot = 2 * 2 * 6 * dtype.itemsize
    per_slot += (wide if attention is SELECTIVE else 0) + (wide if rule == "h2o" else 0) + (4 if rule else 0)
    constants = LAYERS * 3 * (8 + wide)  # the free slot of each row, and a zero
    assert cache.nbytes == 3 * sum(slots) * per_slot + constants
    # What remains allocated when the constructor is done; the allocator rounds each tensor up to 64 bytes.
    kept = sum(event.self_cpu_memory_usage for event in measured.events())
    n_tensors = sum(len(layer.tensors) for layer in cache.layers)
    assert 0 <= kept - cache.nbytes < 64 * n_tensors


def test_decoding_works_in_place():
    """The slots stay where they are, and no step allocates anything like them: 16 times fewer bytes than one layer."""
    model = make(dtype=torch.float32)
    cache = KVCache(model, 64, 12)
    by_chunks(model, cache, tokens(b=64, n=14), [14])
    places = [x.data_ptr() for layer in cache.layers for x in layer.tensors]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        layer = cache.layers[0]
        q, kv = torch.randn(64, 4, 1, 6), torch.randn(64, 2, 1, 6)
        layer.attend(model.blocks[0].attention, q, kv, kv)
    largest = max(event.self_cpu_memory_usage for event in measured.events())
    assert largest < layer.k.numel() * 4 / 2  # logits are 64 * 4 * 13 numbers, k is 64 * 2 * 13 * 6
    by_chunks(model, cache, tokens(b=64, n=5), [])
    assert [x.data_ptr() for layer in cache.layers for x in layer.tensors] == places


# ---- types and modes ----


@pytest.mark.parametrize(("attention", "rule"), [(SELECTIVE, "selective"), (STANDARD, "oldest"), (STANDARD, "tova"),
                                                 (STANDARD, None), (SELECTIVE, None)])  # fmt: skip
def test_half_precision(attention, rule):
    """Within the rounding of bfloat16 (2^-9 of each activation, over 3 layers) of the same weights in float64.

    With budgets of all keys, so that no eviction hangs on a rounded vote. F stays float32.
    """
    half = make(attention, dtype=torch.bfloat16)
    exact = make(attention).to(torch.bfloat16).double()
    for model in (half, exact):
        for block in model.blocks:
            block.attention.wq.weight.data.div_(8)  # sharp softmaxes would enlarge the rounding of their logits
    batch = tokens()
    expected = exact(batch).logits.detach()
    for sizes in ([], [N], [9]):
        cache = KVCache(half, 2, None if rule is None else N, rule=rule)
        actual = by_chunks(half, cache, batch, list(sizes))
        assert actual.dtype == torch.bfloat16
        assert all(layer.k.dtype == torch.bfloat16 for layer in cache.layers)
        if attention is SELECTIVE:
            assert all(layer.F.dtype == torch.float32 for layer in cache.layers)
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        assert error < 0.03


def test_votes_add_up_in_float32_beside_bfloat16_keys():
    """300 votes of 1, one at a time: in bfloat16 the sum would stop at 256."""
    attention = SimpleNamespace(n_heads=1, n_kv_heads=1, head_dim=1, selection_head=0)
    layer = LayerCache(attention, 1, 400, None, dtype=torch.bfloat16, device="cpu")
    one = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    for _ in range(302):
        layer.attend(attention, one, one, one)
    assert layer.F[0, 1].item() == 300  # queries 2 .. 301
    assert layer.F[0, 0].item() == 0


@pytest.mark.parametrize("attention", [SELECTIVE, STANDARD])
def test_autocast(attention):
    """Computes as without it but for the projections' bfloat16; the cache keeps the model's type."""
    model, batch = make(attention, dtype=torch.float32), tokens()
    for block in model.blocks:
        block.attention.wq.weight.data.div_(8)
    expected = model(batch).logits.detach()
    cache = KVCache(model, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = by_chunks(model, cache, batch, [9, 1, 1, 4])
    assert cache.layers[0].k.dtype == torch.float32
    assert (actual - expected).abs().max() / expected.abs().max() < 0.03


def test_another_type_for_the_cache():
    """Half the bytes; the model still computes in float32."""
    model, batch = make(dtype=torch.float32), tokens()
    cache, half = KVCache(model, 2), KVCache(model, 2, dtype=torch.bfloat16)
    assert 0.5 < half.nbytes / cache.nbytes < 0.6  # F is float32 in both
    for sizes in ([N], []):
        half.reset()
        assert by_chunks(model, half, batch, sizes).dtype == torch.float32


def test_no_gradient_and_no_graph():
    model, batch = make(), tokens()
    cache = KVCache(model, 2, 5)
    output = model(batch[:, :9], cache=cache)
    assert not output.logits.requires_grad
    assert not model(batch[:, 9:10], cache=cache).logits.requires_grad
    assert not any(x.requires_grad for layer in cache.layers for x in layer.tensors)
    # The layer by itself, as a search over budgets calls it.
    layer, attention = KVCache(model, 2, 5).layers[0], model.blocks[0].attention
    assert not layer.attend(attention, *attention.project(torch.randn(2, 9, 20).double())).requires_grad


def test_made_in_inference_mode_and_used_outside_and_the_other_way():
    model, batch = make(), tokens()
    expected = by_chunks(model, KVCache(model, 2, 5), batch, [9])
    with torch.inference_mode():
        inside = KVCache(model, 2, 5)
    assert torch.equal(by_chunks(model, inside, batch, [9]), expected)
    outside = KVCache(model, 2, 5)
    with torch.inference_mode():
        assert torch.equal(by_chunks(model, outside, batch, [9]), expected)
