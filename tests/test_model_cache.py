"""The model with a cache and under budgets: one pass, chunks and single tokens, layer by layer, compiled, refused."""

from __future__ import annotations

import functools

import pytest
import torch

from selmodel.attention import SelectiveAttention, StandardAttention
from selmodel.attention.cache import KVCache
from selmodel.errors import UserError
from selmodel.inference.generation import generate
from selmodel.model import Transformer

LAST = functools.partial(SelectiveAttention, selection_head=3)


def make(attention=LAST, *, dtype=torch.float64, **options) -> Transformer:
    """wq and wk large enough that F and evictions matter."""
    sizes = {"n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "d_model": 20, "context_length": 200}
    model = Transformer(40, attention, **{**sizes, **options})
    model.init_weights(0)
    for name, parameter in model.named_parameters():
        if "wq" in name or "wk" in name:
            parameter.data.mul_(6)
    return model.to(dtype)


def text(b=2, n=180):
    return torch.randint(0, 40, (b, n), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("positions", ["learned", "rope", "none"])
@pytest.mark.parametrize(
    ("attention", "rule"),
    [(LAST, None), (LAST, "oldest"), (LAST, "tova"), (StandardAttention, "oldest"), (StandardAttention, "h2o")],
)
def test_whole_sequences_under_budgets_are_those_token_by_token(attention, rule, positions):
    """Longer than a block of queries; a budget of everything beside small ones."""
    model, tokens = make(attention, positions=positions), text()
    budgets = [9, 180, 70]
    whole = model.pruned(tokens, budgets, rule=rule)
    assert whole.memory is None
    cache = KVCache(model, 2, budgets, rule=rule)
    single = [model(token, cache=cache).logits for token in tokens.split(1, 1)]
    torch.testing.assert_close(torch.cat(single, 1), whole.logits, rtol=1e-9, atol=1e-10)
    assert (whole.logits - model(tokens).logits).abs().max() > 1e-3  # something was pruned


@pytest.mark.parametrize("attention", [LAST, StandardAttention])
def test_without_budgets_it_is_the_plain_pass(attention):
    """In float32, to its rounding; the kernels sum in other orders."""
    model, tokens = make(attention, dtype=torch.float32), text()
    expected = model(tokens).logits
    torch.testing.assert_close(model.pruned(tokens, None).logits, expected, rtol=1e-4, atol=1e-5)
    cache = KVCache(model, 2)
    chunks = [model(chunk, cache=cache).logits for chunk in tokens.split([120, 1, 1, 58], 1)]
    torch.testing.assert_close(torch.cat(chunks, 1), expected, rtol=1e-4, atol=1e-5)
    assert cache.length == 180


def test_live_keys_by_a_number_leave_nothing_out_of_a_cache():
    """The threshold drops nearly every key in a plain pass; a cache attends to all it holds, chunk or not."""
    strict, plain = make(functools.partial(LAST, live_keys=0.001)), make()
    expected = plain(text()).logits
    assert (strict(text()).logits - expected).abs().max() > 1e-2
    for sizes in ([180], [1] * 180, [90, 90]):
        cache = KVCache(strict, 2)
        logits = torch.cat([strict(chunk, cache=cache).logits for chunk in text().split(sizes, 1)], 1)
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-10)


def test_a_cache_gives_no_memory_term():
    model = make(functools.partial(LAST, memory_loss={"eps": 0.1}))
    assert model(text()).memory is not None
    for budgets in (None, 9):
        assert model(text(), cache=KVCache(model, 2, budgets)).memory is None


@torch.no_grad()
def test_layer_by_layer():
    """What a search over budgets does: keep what enters a layer, and go on from there under other budgets."""
    model, tokens = make(), text()
    x, rotary = model.embed(tokens)
    entering = []
    for block, layer in zip(model.blocks, KVCache(model, 2, [9, 30, 70]).layers, strict=True):
        entering.append(x)
        x, memory = block(x, rotary, cache=layer)
        assert memory is None
    torch.testing.assert_close(model.unembed(x), model.pruned(tokens, [9, 30, 70]).logits, rtol=1e-12, atol=1e-12)
    # The last two layers again, with less room in the second.
    x = entering[1]
    for block, layer in list(zip(model.blocks, KVCache(model, 2, [9, 12, 70]).layers, strict=True))[1:]:
        x, _ = block(x, rotary, cache=layer)
    torch.testing.assert_close(model.unembed(x), model.pruned(tokens, [9, 12, 70]).logits, rtol=1e-12, atol=1e-12)


def test_the_parts_of_a_plain_pass():
    model, tokens = make(positions="rope", tie_embeddings=True), text(n=20)
    x, rotary = model.embed(tokens)
    for block in model.blocks:
        x, _ = block(x, rotary)
    assert torch.equal(model.unembed(x), model(tokens).logits)
    # Positions go on from `first`.
    late, late_rotary = model.embed(tokens[:, 5:], 5)
    assert torch.equal(late, model.embed(tokens)[0][:, 5:])
    assert torch.equal(late_rotary.cos, rotary.cos[5:])


def test_a_compiled_model_generates_and_prunes():
    """The backend only records what it was asked to compile: nothing, for a cache changes at every step."""
    model, asked = make(dtype=torch.float32), []
    prompt = text(1, 12)[0]
    expected = generate(model, prompt, 6, temperature=0), model.pruned(text(), 9).logits
    model.compile(backend=lambda graph, inputs: asked.append(graph) or graph.forward)
    assert torch.equal(generate(model, prompt, 6, temperature=0), expected[0])
    assert torch.equal(model.pruned(text(), 9).logits, expected[1])
    assert asked == []


def test_checkpointing_and_training_mode_change_nothing():
    model = make(checkpoint_activations=True).train()
    assert torch.equal(model.pruned(text(), 9).logits, make().eval().pruned(text(), 9).logits)


def test_what_does_not_fit_is_refused():
    model = make()
    with pytest.raises(UserError, match=r"context_length=201 of a cache with model\.context_length=200 and learned"):
        model.pruned(text(n=201), 9)
    with pytest.raises(UserError, match=r"budgets=9 with standard attention and no rule"):
        make(StandardAttention).pruned(text(), 9)
    with pytest.raises(UserError, match="expected at least one token"):
        model.pruned(text(n=0), 9)
    with pytest.raises(UserError, match="batch_size=0"):
        KVCache(model, 0)
    cache = KVCache(model, 2, 9, context_length=50)
    model(text(n=50), cache=cache)
    with pytest.raises(UserError, match="1 tokens after the 50 in the cache exceed context_length=50"):
        model(text(n=1), cache=cache)
    # Without learned positions nothing ends at the model's context but a cache made for it.
    rotary = make(positions="rope")
    assert rotary.pruned(text(n=260), 9).logits.isfinite().all()
    cache = KVCache(rotary, 2, 9)
    rotary(text(n=200), cache=cache)
    with pytest.raises(UserError, match="1 tokens after the 200 in the cache exceed context_length=200"):
        rotary(text(n=1), cache=cache)


@pytest.mark.parametrize("attention", [LAST, StandardAttention])
def test_last_only_gives_the_logits_of_the_last_position(attention):
    model, tokens = make(attention), text(n=70)
    for cache in (None, KVCache(model, 2)):
        whole = model(tokens).logits
        last = model(tokens, cache=cache, last_only=True).logits
        assert last.shape == (2, 1, 40)
        torch.testing.assert_close(last, whole[:, -1:], rtol=1e-9, atol=1e-10)
