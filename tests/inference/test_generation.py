import functools

import pytest
import torch

from selmodel.attention import Attention, SelectiveAttention, StandardAttention
from selmodel.attention.cache import KVCache
from selmodel.errors import UserError
from selmodel.inference.generation import generate, sample
from selmodel.model import ModelOutput, Transformer

uncached = functools.partial(generate, cache=False)


class Successor:
    """A "model" that is sure of the next id: the last one plus one, modulo 10."""

    context_length = 8

    def __call__(self, tokens, last_only=False):
        logits = torch.full((*tokens.shape, 10), -30.0)
        logits.scatter_(-1, ((tokens + 1) % 10)[..., None], 30.0)
        return ModelOutput(logits, None)


def test_greedy_continues_to_the_length_asked_for():
    assert uncached(Successor(), torch.tensor([3, 4]), 3, temperature=0).tolist() == [3, 4, 5, 6, 7]


def test_generation_ends_at_eos_and_at_the_context():
    assert uncached(Successor(), torch.tensor([3]), 6, temperature=0, eos_id=6).tolist() == [3, 4, 5]
    assert uncached(Successor(), torch.tensor([0]), 100, temperature=0).tolist() == list(range(8))


def test_one_seed_gives_one_text():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    draws = [
        [sample(logits, 1.0, 1.0, generator).item() for _ in range(20)]
        for generator in (torch.Generator().manual_seed(2), torch.Generator().manual_seed(2))
    ]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 5


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    # probabilities 0.5, 0.3, 0.15, 0.05: 0.7 needs the first two, 0.5 the first alone
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    assert {sample(logits, 1.0, 0.7, generator).item() for _ in range(200)} == {1, 3}
    assert {sample(logits, 1.0, 0.5, generator).item() for _ in range(50)} == {1}
    assert {sample(logits, 1.0, 1.0, generator).item() for _ in range(500)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": -1.0}, "temperature=-1.0"), ({"top_p": 0.0}, "top_p=0.0"), ({"top_p": 1.5}, "top_p=1.5")],
)
def test_options_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        uncached(Successor(), torch.tensor([1]), 1, **options)


def test_a_prompt_longer_than_the_context():
    with pytest.raises(UserError, match="prompt of 9 tokens"):
        uncached(Successor(), torch.arange(9), 1)


def small_model(attention=SelectiveAttention, **options) -> Transformer:
    model = Transformer(30, attention, n_layers=2, n_heads=4, head_dim=8, d_model=24, context_length=40, **options)
    model.init_weights(0)
    for name, parameter in model.named_parameters():  # logits of a size at which keys and F matter
        if "wq" in name or "wk" in name:
            parameter.data.mul_(8)
    return model.double()


PROMPT = torch.tensor([1, 17, 4, 4, 9])


@pytest.mark.parametrize("attention", [SelectiveAttention, StandardAttention])
@pytest.mark.parametrize("budgets", [None, 40, [40, 99]])
def test_with_room_for_all_keys_the_cache_changes_no_token(attention, budgets):
    """Greedy and sampled; up to the end of the context."""
    model = small_model(attention)
    rule = "oldest" if budgets is not None and attention is StandardAttention else None
    expected = uncached(model, PROMPT, 100, temperature=0)
    assert len(expected) == 40
    assert torch.equal(generate(model, PROMPT, 100, temperature=0, budgets=budgets, rule=rule), expected)
    draws = [
        function(model, PROMPT, 30, generator=torch.Generator().manual_seed(5))
        for function in (uncached, functools.partial(generate, budgets=budgets, rule=rule))
    ]
    assert torch.equal(*draws)


def test_budgets_are_those_of_the_cache():
    """Each token is the likeliest by a cache of these budgets that sees the text so far anew."""
    model = small_model()
    text = generate(model, PROMPT, 20, temperature=0, budgets=[3, 5])
    assert not torch.equal(text, generate(model, PROMPT, 20, temperature=0))
    for end in range(len(PROMPT), len(text)):
        logits = model(text[None, :end], cache=KVCache(model, 1, [3, 5])).logits
        assert logits[0, -1].argmax() == text[end]


def test_budgets_need_a_cache():
    with pytest.raises(UserError, match=r"budgets=4, rule=None with cache=False"):
        generate(small_model(), PROMPT, 3, budgets=4, cache=False)
    with pytest.raises(UserError, match=r"budgets=None, rule=oldest with cache=False"):
        generate(small_model(), PROMPT, 3, rule="oldest", cache=False)
    with pytest.raises(UserError, match=r"budgets=4 with standard attention and no rule"):
        generate(small_model(StandardAttention), PROMPT, 3, budgets=4)


def test_a_cache_of_ones_own_is_reset_and_brings_its_budgets():
    model = small_model()
    cache = KVCache(model, 1, [3, 5])
    texts = [generate(model, prompt, 20, temperature=0, cache=cache) for prompt in (PROMPT, PROMPT.flip(0), PROMPT)]
    assert torch.equal(texts[0], generate(model, PROMPT, 20, temperature=0, budgets=[3, 5]))
    assert torch.equal(texts[0], texts[2])
    assert cache.length == 24  # nothing follows the last token, so it is not in the cache
    with pytest.raises(UserError, match=r"budgets=4, rule=None beside a cache, which has budgets=\[3, 5\]"):
        generate(model, PROMPT, 3, cache=cache, budgets=4)
    # A cache made for less than the model's context ends the text there.
    short = KVCache(model, 1, [3, 5], context_length=12)
    assert torch.equal(generate(model, PROMPT, 20, temperature=0, cache=short), texts[0][:12])
    with pytest.raises(UserError, match=r"prompt of 13 tokens: expected from 1 to cache\.context_length=12"):
        generate(model, texts[0][:13], 3, cache=short)
    with pytest.raises(UserError, match=r"batch size 1 with a cache of batch_size=2"):
        generate(model, PROMPT, 3, cache=KVCache(model, 2))


@pytest.mark.parametrize("cache", [True, False])
def test_every_token_is_reported_as_it_comes(cache):
    model, seen = small_model(), []
    text = generate(model, PROMPT, 12, temperature=0, cache=cache, on_token=seen.append)
    assert seen == text[len(PROMPT) :].tolist()
    assert len(seen) == 12
    eos = seen[4]
    again = []
    shorter = generate(model, PROMPT, 12, temperature=0, cache=cache, eos_id=eos, on_token=again.append)
    assert again == shorter[len(PROMPT) :].tolist() == seen[: seen.index(eos)]


class LastKey(Attention):
    """A kind of its own, which says nothing of a cache: every query sees the key before it alone."""

    def attend(self, q, k, v, document_ids):
        return v.roll(1, 2), None


def test_a_kind_that_cannot_be_cached_generates_without():
    model = small_model(LastKey)
    assert len(generate(model, PROMPT, 5, temperature=0)) == 10
    assert torch.equal(generate(model, PROMPT, 5, temperature=0), uncached(model, PROMPT, 5, temperature=0))
    with pytest.raises(UserError, match="LastKey does not support a cache"):
        generate(model, PROMPT, 5, budgets=4)


def test_a_context_longer_than_the_models_table_where_positions_allow_it():
    """Rotary positions have no table: a cache of budgets goes on past the context, as far as the cache was made for."""
    model = small_model(positions="rope")
    cache = KVCache(model, 1, 6, context_length=100)
    text = torch.arange(90).remainder(30)[None]
    whole = model(text, cache=cache).logits
    cache.reset()
    pieces = [model(piece, cache=cache).logits for piece in text.split(7, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-9, atol=1e-10)
    # Generation stops at the model's context all the same.
    assert len(generate(model, PROMPT, 100, temperature=0, cache=cache)) == 40


def test_top_k_keeps_the_likeliest():
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    assert {sample(logits, 1.0, 1.0, generator, top_k=2).item() for _ in range(200)} == {1, 3}
    assert {sample(logits, 1.0, 1.0, generator, top_k=1).item() for _ in range(50)} == {1}
    assert {sample(logits, 1.0, 1.0, generator, top_k=9).item() for _ in range(500)} == {0, 1, 2, 3}
    with pytest.raises(UserError, match="top_k=0"):
        uncached(Successor(), torch.tensor([1]), 1, top_k=0)


@pytest.mark.parametrize("temperature", [1e-8, 1e-40, 1e-60, 5e-324])
def test_any_temperature_above_zero_samples(temperature):
    """1e-40 overflows float32 when divided by, and below 1e-45 float32 has no number but 0."""
    logits = torch.tensor([-7.0, 80.0, 79.5, 80.0])
    generator = torch.Generator().manual_seed(0)
    assert {sample(logits, temperature, 1.0, generator).item() for _ in range(100)} == {1, 3}


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(temperature, bad):
    class Diverged(Successor):
        def __call__(self, tokens, last_only=False):
            output = super().__call__(tokens)
            if tokens.shape[1] == 3:
                output.logits[0, -1, 2] = bad
            return output

    with pytest.raises(UserError, match="logits after 3 tokens are not finite"):
        uncached(Diverged(), torch.tensor([1]), 5, temperature=temperature)
