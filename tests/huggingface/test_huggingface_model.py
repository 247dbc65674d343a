"""The model behind Hugging Face's interface: the same numbers, padding that is not seen, and the pruning cache."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from selmodel.attention import SelectiveAttention, StandardAttention
from selmodel.attention.base import Attention
from selmodel.attention.cache import KVCache
from selmodel.errors import UserError
from selmodel.huggingface import SelModelConfig, SelModelForCausalLM
from selmodel.inference.generation import generate
from selmodel.model import Transformer
from selmodel.training.losses import token_losses

transformers_logging.disable_progress_bar()
LAST = functools.partial(SelectiveAttention, selection_head=3)
KINDS = {"selective": LAST, "standard": functools.partial(StandardAttention, qk_norm=True)}
EOS = 2


def make(attention="selective", *, dtype=torch.float64, **options) -> SelModelForCausalLM:
    """wq and wk large enough that F and evictions matter."""
    sizes = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "d_model": 20, "context_length": 64}
    model = Transformer(40, KINDS[attention], **{**sizes, **options})
    model.init_weights(0)
    for name, parameter in model.named_parameters():
        if "wq" in name or "wk" in name:
            parameter.data.mul_(6)
    config = SelModelConfig.from_model(model, bos_token_id=1, eos_token_id=EOS, pad_token_id=EOS)
    wrapped = SelModelForCausalLM(config)
    wrapped.model.load_state_dict(model.state_dict())
    return wrapped.to(dtype).eval()


def text(b=2, n=40, seed=1):
    return torch.randint(3, 40, (b, n), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows as one batch, padded on the left."""
    n = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([row.new_full((n - len(row),), EOS), row]) for row in rows])
    mask = torch.stack([torch.arange(n) >= n - len(row) for row in rows]).long()
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rope", "none"])
@pytest.mark.parametrize("attention", list(KINDS))
def test_saved_and_loaded_it_gives_the_same_logits_bit_for_bit(attention, positions, tie, tmp_path):
    model = make(attention, positions=positions, tie_embeddings=tie, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is SelModelForCausalLM
    assert not any(info.values()), info
    assert loaded.model.options() == model.model.options()
    tokens = text()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model.model(tokens).logits)
    for block in loaded.model.blocks:
        if attention == "selective":  # built without weights, whose device chooses the kernel
            assert block.attention.kernel is model.model.blocks[0].attention.kernel


def test_other_libraries_find_the_sizes_by_their_names(tmp_path):
    make().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    found = {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    assert found == {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert config.max_position_embeddings == 64
    assert config.num_key_value_heads == 2


def test_the_loss_is_that_of_training_and_leaves_out_what_is_not_counted():
    model, tokens = make(), text()
    labels = tokens.clone()
    labels[0, :20] = -100
    output = model(tokens, labels=labels)
    losses = token_losses(model.model(tokens).logits[:, :-1], tokens[:, 1:])
    counted = labels[:, 1:] != -100
    # The loss is taken in float32, as training takes it.
    torch.testing.assert_close(output.loss.double(), losses.double()[counted].mean(), rtol=1e-6, atol=0)
    output.loss.backward()
    assert model.model.blocks[0].attention.wq.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("attention", list(KINDS))
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_row_of_a_padded_batch_gives_what_it_gives_alone(attention, use_cache):
    """In float64, to the rounding of matrix products of other shapes."""
    model = make(attention)
    rows = [text(1, n, seed=n)[0] for n in (11, 30, 11, 2)]
    with torch.no_grad():
        together = model(**padded(rows), use_cache=use_cache).logits
        for row, logits in zip(rows, together, strict=True):
            torch.testing.assert_close(logits[-len(row) :], model.model(row[None]).logits[0], rtol=1e-11, atol=1e-12)
            assert not logits[: -len(row)].any()


def test_padding_on_the_right_changes_nothing_before_it():
    model, row = make(), text(1, 20)
    ids = torch.cat([row, row.new_full((1, 5), EOS)], 1)
    mask = torch.tensor([[1] * 20 + [0] * 5])
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[:, :20]
    torch.testing.assert_close(logits, model.model(row).logits, rtol=1e-11, atol=1e-12)
    with pytest.raises(UserError, match="padding_side='left'"):
        model(ids, attention_mask=mask, use_cache=True)


@pytest.mark.parametrize(
    ("attention", "budgets", "rule"),
    [("selective", None, None), ("selective", [5, 9], None), ("selective", 6, "tova"), ("standard", 6, "oldest")],
)
def test_greedy_text_is_that_of_our_own_generation_padded_or_not(attention, budgets, rule):
    model = make(attention)
    model.config.budgets, model.config.rule = budgets, rule
    rows = [text(1, n, seed=n)[0] for n in (12, 20, 5)]
    found = model.generate(**padded(rows), max_new_tokens=25, do_sample=False, eos_token_id=None)
    for row, tokens in zip(rows, found, strict=True):
        expected = generate(model.model, row, 25, temperature=0, budgets=budgets, rule=rule)
        assert tokens[20 - len(row) :].tolist() == expected.tolist()
    if budgets is not None:
        model.config.budgets = model.config.rule = None
        assert not torch.equal(
            found, model.generate(**padded(rows), max_new_tokens=25, do_sample=False, eos_token_id=None)
        )


def test_a_cache_of_ones_own_brings_its_budgets_and_holds_no_more():
    model, tokens = make(), text(2, 12)
    cache = model.make_cache(6)
    output = model.generate(
        tokens, cache=cache, max_new_tokens=20, do_sample=False, eos_token_id=None, return_dict_in_generate=True
    )
    expected = KVCache(model.model, 2, 6)
    assert cache.nbytes == expected.nbytes < KVCache(model.model, 2).nbytes
    assert cache.get_seq_length() == 31  # the last token has not been read
    for row, found in zip(tokens, output.sequences, strict=True):
        assert found.tolist() == generate(model.model, row, 20, temperature=0, budgets=6).tolist()
    cache.reset()
    assert cache.get_seq_length() == 0


def test_a_long_prompt_read_in_chunks_gives_the_same():
    model, tokens = make(), text(1, 40)
    whole, parts = model.make_cache(7), model.make_cache(7)
    with torch.no_grad():
        expected = model(tokens, cache=whole).logits
        found = torch.cat([model(chunk, cache=parts).logits for chunk in tokens.split([3, 30, 7], 1)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("budgets", [None, 64])
def test_beams_with_a_cache_are_those_without(budgets):
    """Beams change places at every step, and the prompts have different padding; 64 keys are all there are."""
    model = make()
    model.config.budgets = budgets
    prompts = padded([text(1, n, seed=seed)[0] for seed, n in enumerate((12, 7, 12))])
    options = {"max_new_tokens": 15, "num_beams": 4, "num_return_sequences": 2, "do_sample": False}
    with_cache = model.generate(**prompts, **options)
    assert torch.equal(with_cache, model.generate(**prompts, **options, use_cache=False))
    assert len({tuple(row.tolist()) for row in with_cache}) == 6


def test_reordering_moves_all_that_a_layer_knows():
    """Under a budget, and by the rule that keeps sums too: rows go on exactly as those they were taken from."""
    model, tokens = make().model, text(3, 30)
    for rule in (None, "h2o"):
        cache = KVCache(model, 3, 7, rule=rule)
        with torch.no_grad():
            model(tokens, cache=cache)
            following = torch.tensor([[5], [6], [7]])
            order = torch.tensor([2, 0, 0])
            cache.reorder(order)
            found = [model(following[order], cache=cache).logits for _ in range(4)]
            again = KVCache(model, 3, 7, rule=rule)
            model(tokens, cache=again)
            expected = [model(following, cache=again).logits for _ in range(4)]
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other[order])


def test_sampling_follows_the_seed():
    model, tokens = make(), text(1, 10)
    options = {"max_new_tokens": 10, "do_sample": True, "top_k": 5}
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(model.generate(tokens, **options).tolist())
    assert texts[0] == texts[1] != texts[2]


def test_what_is_not_supported_is_refused():
    model, tokens = make(), text(2, 10)
    holes = torch.ones(2, 10)
    holes[0, 4] = 0
    with pytest.raises(UserError, match="hides tokens in other places"):
        model(tokens, attention_mask=holes)
    with pytest.raises(UserError, match="hides all tokens of a row"):
        model(tokens, attention_mask=torch.zeros(2, 10))
    with pytest.raises(UserError, match=r"shape \[2, 9\]"):
        model(tokens, attention_mask=torch.ones(2, 9))
    with pytest.raises(UserError, match=r"65 tokens with model\.context_length=64"):
        model(text(1, 65))
    with pytest.raises(UserError, match="context_length=64: ask for fewer"):
        model.generate(tokens, max_new_tokens=56)
    with pytest.raises(UserError, match="make_cache"):
        model(tokens, cache=DynamicCache())
    with pytest.raises(UserError, match="cache_implementation=static"):
        model.generate(tokens, max_new_tokens=3, cache_implementation="static")
    with pytest.raises(UserError, match="output_attentions"):
        model(tokens, output_attentions=True)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(tokens[:1], assistant_model=make(), max_new_tokens=3)
    with pytest.raises(UserError, match="vocabulary is fixed"):
        model.resize_token_embeddings(50)
    with pytest.raises(UserError, match="budgets"):
        model.make_cache(1)
    for refused in (lambda cache: cache.crop(1), lambda cache: cache.batch_repeat_interleave(2)):
        with pytest.raises(UserError, match="the cache cannot"):
            refused(model.make_cache())


def test_a_folder_of_an_unknown_kind_of_attention_is_refused():
    config = make().config
    config.attention = {"kind": "os.system"}
    with pytest.raises(UserError, match=r"attention.kind=os.system in config.json: expected one of Selective"):
        SelModelForCausalLM(config)


def test_another_kind_of_attention_is_not_exported():
    class Own(StandardAttention):
        pass

    assert issubclass(Own, Attention)
    model = Transformer(40, Own, n_layers=1, n_heads=2, head_dim=4, d_model=8, context_length=8)
    with pytest.raises(UserError, match="kind Own: is not part of selmodel"):
        SelModelConfig.from_model(model)
