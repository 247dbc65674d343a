"""The cache against the definition: full attention with -inf at every (query, key) whose key had left.

The oracle runs the model layer by layer on the whole sequence. In each layer it decides in plain loops, query by query,
which key leaves, from F and the weights of the definition.
"""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch

from selmodel.attention import SelectiveAttention, StandardAttention
from selmodel.attention.cache import KVCache
from selmodel.attention.rotary import rotary_tables
from selmodel.attention.selection import accumulate, selection_scores
from selmodel.errors import UserError
from selmodel.model import Transformer

N, VOCAB, LAYERS = 23, 40, 3
STANDARD = StandardAttention
SELECTIVE = functools.partial(SelectiveAttention, selection_head=2)


def make(attention=SELECTIVE, positions="learned", dtype=torch.float64) -> Transformer:
    sizes = {"n_layers": LAYERS, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "d_model": 20, "context_length": N}
    model = Transformer(VOCAB, attention, **sizes, positions=positions)
    model.init_weights(0)
    for name, parameter in model.named_parameters():  # logits of a size at which F and evictions matter
        if "wq" in name or "wk" in name:
            parameter.data.mul_(8)
    return model.to(dtype).eval()


def tokens(b=2, n=N, seed=0):
    return torch.randint(0, VOCAB, (b, n), generator=torch.Generator().manual_seed(seed))


def oracle_attention(attention, q, k, v, budget, rule, n_sinks):
    """out [b, h, n, d] by loops over sequences and queries."""
    b, h, n, d = q.shape
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    logits = q @ k.mT / d**0.5
    F = torch.zeros(b, n + 1, n, dtype=q.dtype)  # F[i+1] after the votes of query i
    if attention.selection_head is not None:
        S = selection_scores(logits[:, attention.selection_head])
        F = torch.cat((accumulate(S), S.sum(1, keepdim=True)), 1)
    out = torch.zeros_like(q)
    for x in range(b):
        held: list[int] = []
        sums = [0.0] * n
        for i in range(n):
            held.append(i)
            row = (logits[x, :, i] - F[x, i])[:, held].softmax(-1)  # [h, held]
            out[x, :, i] = (row[:, None] @ v[x][:, held])[:, 0]
            last = dict(zip(held, row.sum(0).tolist(), strict=True))
            for j in held:
                sums[j] += last[j]
            if len(held) <= budget:
                continue
            if rule == "selective":
                candidates = [j for j in held if j not in (0, i)]
                leaves = max(candidates, key=lambda j: (F[x, i + 1, j].item(), -j))
            elif rule == "oldest":
                leaves = min(j for j in held if j >= min(n_sinks, budget - 1))
            elif rule == "h2o":
                leaves = min((j for j in held if j <= i - budget // 2), key=lambda j: (sums[j], j))
            else:
                leaves = min(held, key=lambda j: (last[j], j))
            held.remove(leaves)
    return out


@torch.no_grad()
def oracle(model, batch, budgets, rule, n_sinks=4):
    position = torch.arange(batch.shape[1])
    x = model.embedding(batch)
    if model.position_embedding is not None:
        x = x + model.position_embedding(position)
    rotary = rotary_tables(position, model.head_dim, model.rope_base) if model.positions == "rope" else None
    for block, budget in zip(model.blocks, budgets, strict=True):
        attention = block.attention
        q, k, v = attention.project(block.attention_norm(x), rotary)
        out = oracle_attention(attention, q, k, v, budget, rule, n_sinks)
        x = x + attention.wo(out.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    return torch.nn.functional.linear(model.norm(x), model.head.weight)


def by_chunks(model, cache, batch, sizes):
    """Logits of the whole sequence, given to the cache in chunks of these sizes, and then token by token."""
    logits, at = [], 0
    while at < batch.shape[1]:
        size = min(sizes.pop(0) if sizes else 1, batch.shape[1] - at)
        logits.append(model(batch[:, at : at + size], cache=cache).logits)
        at += size
    return torch.cat(logits, 1).detach()


CHUNKS = {"one": [], "threes": [3] * 8, "whole": [N], "half, then tokens": [11], "mixed": [2, 9, 1, 1, 5]}


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("chunks", sorted(CHUNKS))
@pytest.mark.parametrize(
    ("attention", "rule"),
    [(SELECTIVE, x) for x in ("selective", "oldest", "h2o", "tova")]
    + [(STANDARD, x) for x in ("oldest", "h2o", "tova")],
)
def test_cached_logits_are_those_of_the_definition(attention, rule, positions, chunks):
    model, batch = make(attention, positions), tokens()
    draw = random.Random(f"{rule}{positions}{chunks}")
    for budgets in ([2, 3, 2], [draw.randint(2, N) for _ in range(LAYERS)], [5, N, 9]):
        expected = oracle(model, batch, budgets, rule)
        cache = KVCache(model, 2, budgets, rule=rule)
        actual = by_chunks(model, cache, batch, list(CHUNKS[chunks]))
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10, msg=lambda m, x=budgets: f"{x}: {m}")
        assert [layer.held for layer in cache.layers] == budgets


@pytest.mark.parametrize("chunks", sorted(CHUNKS))
@pytest.mark.parametrize("attention", [SELECTIVE, STANDARD])
@pytest.mark.parametrize("budgets", [None, N, N + 9])
def test_with_room_for_all_keys_nothing_is_pruned(attention, chunks, budgets):
    model, batch = make(attention, dtype=torch.float32), tokens()
    rule = None if budgets is None or attention is SELECTIVE else "oldest"
    actual = by_chunks(model, KVCache(model, 2, budgets, rule=rule), batch, list(CHUNKS[chunks]))
    torch.testing.assert_close(actual, model(batch).logits.detach(), rtol=1e-4, atol=1e-5)


def test_float32_within_its_rounding():
    model, exact = make(dtype=torch.float32), make()
    batch = tokens()
    expected = oracle(exact, batch, [4, 7, 5], "selective")
    actual = by_chunks(model, KVCache(model, 2, [4, 7, 5]), batch, [6, 6])
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_row_alone_and_after_another_prompt():
    """Rows of a batch evict different keys; a cache that has been used and reset is as new."""
    model, batch = make(), tokens(b=3)
    together = by_chunks(model, KVCache(model, 3, 4), batch, [10])
    cache = KVCache(model, 1, 4)
    for row in range(3):
        alone = by_chunks(model, cache, batch[row : row + 1], [10])
        torch.testing.assert_close(alone, together[row : row + 1], rtol=1e-9, atol=1e-10)
        cache.reset()


@pytest.mark.parametrize("attention", [SELECTIVE, STANDARD])
def test_memory_is_allocated_at_the_budget(attention):
    """Slots: min(K, context) + 1, of keys and values of 2 heads of 6 numbers in float32; the rest is small."""
    model = make(attention, dtype=torch.float32)
    cache = KVCache(model, 3, [5, 100, 2], rule="oldest")
    slots = (5 + 1) + (N + 1) + (2 + 1)
    keys_and_values = slots * 3 * 2 * 6 * 4 * 2
    assert sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.k, layer.v)) == keys_and_values
    every_tensor = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in every_tensor}
    assert cache.nbytes == sum(storages.values())
    assert cache.nbytes < keys_and_values + slots * 3 * 4 * 3 + 3 * 64
    before = cache.nbytes
    by_chunks(model, cache, tokens(b=3), [9])
    assert cache.nbytes == before


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        (SELECTIVE, {"budgets": [4, 4]}, "2 entries with model.n_layers=3: expected 3"),
        (SELECTIVE, {"budgets": [4, 1, 4]}, r"budgets\[1\]=1: expected an integer of at least 2"),
        (SELECTIVE, {"budgets": 4.5}, r"budgets=4\.5: expected an integer of at least 2"),
        (SELECTIVE, {"budgets": True}, "budgets=True: expected an integer"),
        (SELECTIVE, {"budgets": 4, "rule": "lru"}, "rule=lru: no such pruning rule; choose one of selective, oldest"),
        (SELECTIVE, {"rule": "h2o"}, "rule=h2o without budgets"),
        (STANDARD, {"budgets": 4}, "budgets=4 with standard attention and no rule"),
        (STANDARD, {"budgets": 4, "rule": "selective"}, "rule=selective with standard attention, which has no votes"),
        (SELECTIVE, {"context_length": N + 1}, "learned positions"),
    ],
)
def test_bad_options_are_named(attention, options, message):
    with pytest.raises(UserError, match=message):
        KVCache(make(attention), 1, **options)


def test_a_chunk_that_does_not_fit_is_refused_before_anything_changes():
    model = make()
    cache = KVCache(model, 2)
    model(tokens(n=20), cache=cache)
    for batch, message in (
        (tokens(n=4), f"4 tokens after the 20 in the cache exceed context_length={N}"),
        (tokens(b=1, n=1), "tokens of batch size 1 with a cache of batch_size=2"),
    ):
        with pytest.raises(UserError, match=message):
            model(batch, cache=cache)
    with pytest.raises(UserError, match="document_ids with a cache"):
        model(tokens(n=2), torch.zeros(2, 2, dtype=torch.int64), cache=cache)
    assert cache.length == 20
    assert math.isfinite(model(tokens(n=3), cache=cache).logits.sum().item())
