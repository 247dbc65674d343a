"""The transformer: sizes, initial values, causality, documents, positions, compile, checkpointing, faults."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from selmodel.attention import SelectiveAttention, StandardAttention
from selmodel.attention.selection import accumulate, memory_loss, memory_term, selection_scores
from selmodel.errors import UserError
from selmodel.model import Transformer

WITH_MEMORY = functools.partial(SelectiveAttention, memory_loss={"eps": 0.1})
KINDS = [StandardAttention, SelectiveAttention, WITH_MEMORY]
VOCAB = 40


def make(attention=SelectiveAttention, *, seed=0, scale=4.0, **options) -> Transformer:
    """A small model; wq and wk times `scale`, so that logits and F are of a size at which faults show."""
    sizes = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "d_model": 20, "context_length": 24}
    model = Transformer(VOCAB, attention, **{**sizes, **options})
    model.init_weights(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("wq.weight", "wk.weight")):
                parameter.mul_(scale)
    return model


def random_tokens(b=2, n=16, seed=0):
    return torch.randint(VOCAB, (b, n), generator=torch.Generator().manual_seed(seed))


# ---- sizes ----


def test_the_papers_size_rule():
    """depth 3: 3 layers of 3 heads of 64, d_model 192, SwiGLU width 8/3 * 192 = 512."""
    options = Transformer(VOCAB, StandardAttention, depth=3).options()
    expected = {"n_layers": 3, "n_heads": 3, "n_kv_heads": 3, "head_dim": 64, "d_model": 192, "d_ff": 512}
    assert {name: options[name] for name in expected} == expected
    assert (options["context_length"], options["positions"]) == (512, "learned")


def test_depth_12_is_about_100_million_parameters():
    with torch.device("meta"):
        counts = Transformer(8192, SelectiveAttention).n_parameters()
    # attention 12 * 4 * 768^2, mlp 12 * 3 * 768 * 2048, embedding and head 8192 * 768, positions 512 * 768,
    # norms 25 * 768
    assert counts == {
        "embedding": 6291456,
        "positions": 393216,
        "attention": 28311552,
        "mlp": 56623104,
        "norms": 19200,
        "head": 6291456,
        "total": 97929984,
    }


def test_a_head_sweep_keeps_width_and_head_size():
    """Claim 2's sweep: twice the heads are twice the attention parameters, and nothing else changes."""
    few, many = (Transformer(VOCAB, StandardAttention, depth=2, n_heads=h) for h in (2, 4))
    assert few.d_model == many.d_model == 128
    few, many = few.n_parameters(), many.n_parameters()
    assert many["attention"] == 2 * few["attention"]
    assert many["total"] - many["attention"] == few["total"] - few["attention"]


@pytest.mark.parametrize(("d_model", "d_ff"), [(128, 384), (192, 512), (24, 64), (64, 192), (768, 2048)])
def test_swiglu_width_is_rounded_up_to_a_multiple_of_64(d_model, d_ff):
    model = Transformer(VOCAB, StandardAttention, n_layers=1, n_heads=1, head_dim=8, d_model=d_model)
    assert model.d_ff == d_ff
    assert model.blocks[0].mlp.gate.weight.shape == (d_ff, d_model)


@pytest.mark.parametrize("tie", [False, True])
def test_parameters_by_part_by_hand(tie):
    """Per layer wq, wo 20*24, wk, wv 20*12: 1440; mlp 3 * 20 * 64 = 3840; five norms of 20."""
    counts = make(tie_embeddings=tie).n_parameters()
    head = 0 if tie else 800
    assert counts == {
        "embedding": 800,
        "positions": 480,
        "attention": 2880,
        "mlp": 7680,
        "norms": 100,
        "head": head,
        "total": 11940 + head,
    }


def test_options_are_plain_values():
    def leaves(value):
        return [x for v in value.values() for x in leaves(v)] if isinstance(value, dict) else [value]

    options = make(positions="rope").options()
    assert all(type(leaf) in (int, float, str, bool, type(None)) for leaf in leaves(options))
    assert options["attention"] == {"kind": "SelectiveAttention", "qk_norm": False, "selection_head": 0}
    assert options["rope_base"] == 10000.0
    # What does not change the function computed is no part of it.
    assert make(WITH_MEMORY, positions="rope", checkpoint_activations=True).options() == options


@pytest.mark.parametrize("tie", [False, True])
def test_flops_against_a_counter_of_matrix_products(tie):
    """The eager kernel multiplies all n keys; the formula's (n' + 1) / 2 are n for n' = 2n - 1.

    The counter sees every product of forward and backward, so this also checks the factor 3.
    """
    model = make(functools.partial(SelectiveAttention, kernel="eager"), tie_embeddings=tie)
    tokens = random_tokens(b=3, n=10)
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    assert counter.get_total_flops() == 30 * model.flops_per_token(2 * 10 - 1)


def test_flops_of_the_models_own_context():
    """Per layer 1440 + 3840 weights, head 800, attention 24 wide over 25/2 keys twice: 2 * (2*5280 + ...) * 3."""
    assert make().flops_per_token() == 6 * (2 * 5280 + 800 + 2 * 24 * 25)


# ---- initial values ----


def test_kinds_of_one_seed_are_bit_identical():
    models = [make(kind, seed=3, scale=1.0).state_dict() for kind in KINDS]
    for other in models[1:]:
        assert list(other) == list(models[0])
        assert all(torch.equal(other[name], models[0][name]) for name in other)


class WithGate(StandardAttention):
    """A kind that adds a parameter, before and beside the shared ones."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gate_bias = torch.nn.Parameter(torch.full((self.n_heads,), 7.0))


def test_an_added_parameter_keeps_its_value_and_shifts_no_other():
    plain, gated = make(StandardAttention).state_dict(), make(WithGate).state_dict()
    assert all(torch.equal(gated[name], plain[name]) for name in plain)
    added = set(gated) - set(plain)
    assert added == {"blocks.0.attention.gate_bias", "blocks.1.attention.gate_bias"}
    assert all((gated[name] == 7.0).all() for name in added)


def test_values_do_not_depend_on_the_default_device():
    """Models are built under torch.device("cuda"), or "meta" and filled later; the draws stay on the CPU."""
    with torch.device("meta"):
        model = make(seed=3)
    model.to_empty(device="cpu").init_weights(seed=3)
    expected = make(seed=3, scale=1.0).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())


def test_seeds_differ_and_repeat():
    first, again, other = (make(seed=seed).state_dict() for seed in (1, 1, 2))
    weights = [name for name in first if "norm" not in name]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in weights)
    torch.manual_seed(5)
    unseeded = make(seed=None).state_dict()
    torch.manual_seed(5)
    assert all(torch.equal(unseeded[name], x) for name, x in make(seed=None).state_dict().items())


def test_a_seed_leaves_the_global_generator_alone():
    model = make()
    state = torch.get_rng_state()
    model.init_weights(seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_two_layers_start_equal():
    blocks = make().blocks
    assert not torch.equal(blocks[0].attention.wq.weight, blocks[1].attention.wq.weight)
    assert not torch.equal(blocks[0].mlp.gate.weight, blocks[0].mlp.up.weight)


def test_the_first_loss_is_that_of_guessing():
    model = Transformer(500, SelectiveAttention, depth=2, context_length=64)
    model.init_weights(0)
    tokens = torch.randint(500, (4, 65), generator=torch.Generator().manual_seed(0))
    logits = model(tokens[:, :-1]).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert loss == pytest.approx(math.log(500), abs=0.1)


# ---- what a forward pass may depend on ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", ["learned", "rope", "none"])
def test_no_later_token_influences_earlier_logits(kind, positions):
    """Bit for bit, for the logits and the memory term of every layer."""
    model, tokens = make(kind, positions=positions), random_tokens()
    output = model(tokens)
    for position in (1, 7, 15):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % VOCAB
        other = model(changed)
        assert torch.equal(other.logits[:, :position], output.logits[:, :position])
        assert not torch.equal(other.logits[:, position], output.logits[:, position])
        if output.memory is not None:
            assert torch.equal(other.memory[:, :, :position], output.memory[:, :, :position])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", ["learned", "rope", "none"])
def test_another_document_has_no_influence_at_all(kind, positions):
    """Changing document 1 changes logits and memory of document 2 by exactly 0, and the reverse."""
    model, tokens = make(kind, positions=positions), random_tokens()
    ids = torch.tensor([[0] * 6 + [1] * 10, [0] * 6 + [1] * 10], dtype=torch.int32)
    output = model(tokens, ids)
    for changed_part, kept_part in ((slice(0, 6), slice(6, 16)), (slice(6, 16), slice(0, 6))):
        changed = tokens.clone()
        changed[:, changed_part] = (changed[:, changed_part] + 3) % VOCAB
        other = model(changed, ids)
        assert torch.equal(other.logits[:, kept_part], output.logits[:, kept_part])
        assert not torch.equal(other.logits[:, changed_part], output.logits[:, changed_part])
        if output.memory is not None:
            assert torch.equal(other.memory[:, :, kept_part], output.memory[:, :, kept_part])
    assert not torch.equal(model(tokens).logits[:, 6:], output.logits[:, 6:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", ["rope", "none"])
def test_a_packed_document_equals_the_document_alone(kind, positions):
    """Selection is reset. (Learned positions are absolute, so there the two differ by their position.)"""
    model, tokens = make(kind, positions=positions).double(), random_tokens()
    ids = torch.tensor([[0] * 6 + [1] * 10] * 2)
    packed, alone = model(tokens, ids), model(tokens[:, 6:])
    # Rotary tables are float32 also in a float64 model: differences of angles agree to 1e-6.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if positions == "rope" else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(packed.logits[:, 6:], alone.logits, **tolerance)
    if alone.memory is not None:
        torch.testing.assert_close(packed.memory[:, :, 6:], alone.memory, **tolerance)


def test_positions_matter_and_none_means_none():
    """The last logits of a sequence whose first five tokens are shuffled, <BOS> kept, standard attention.

    One layer: with more, a layer without positions still tells order from its causal mask.
    """
    tokens = random_tokens(b=1, n=6)
    shuffled = tokens[:, [0, 3, 1, 4, 2, 5]]
    for positions, differs in (("learned", True), ("rope", True), ("none", False)):
        model = make(StandardAttention, positions=positions, n_layers=1).double()
        last, other = model(tokens).logits[:, -1], model(shuffled).logits[:, -1]
        assert torch.allclose(last, other, rtol=1e-9, atol=1e-12) != differs, positions


# ---- memory and statistics ----


def layer_inputs(model, tokens, ids=None):
    """q and k of every layer, caught where the layer's attention gets them."""
    caught = []
    hooks = [
        block.attention.register_forward_hook(
            lambda module, args, out: caught.append(module.project(args[0], args[1])[:2])
        )
        for block in model.blocks
    ]
    output = model(tokens, ids)
    for hook in hooks:
        hook.remove()
    return output, caught


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_memory_and_statistics_of_every_layer(positions):
    """[n_layers, b, n], each layer's from its own selection head, by the definition."""
    model, tokens = make(WITH_MEMORY, positions=positions, scale=30.0), random_tokens()
    output, caught = layer_inputs(model, tokens)
    statistics = model.selection_statistics(tokens)
    assert output.memory.shape == (2, 2, 16)
    assert statistics.mean_F.shape == (2,)
    causal = torch.ones(16, 16).tril().bool().expand(2, 16, 16)
    for layer, (q, k) in enumerate(caught):
        F = accumulate(selection_scores(q[:, 0] @ k[:, 0].mT / 6**0.5))
        torch.testing.assert_close(output.memory[layer], memory_term(F))
        torch.testing.assert_close(statistics.mean_F[layer], F[causal].mean())
    assert (statistics.mean_F > 0.01).all()
    assert model.memory_loss_eps == 0.1
    # The loss by hand: the largest M of each layer and sequence, over 2 layers * 16 tokens, mean of 2 sequences.
    by_hand = sum(output.memory[layer, b].max() for layer in range(2) for b in range(2)) / (2 * 16) / 2
    torch.testing.assert_close(memory_loss(output.memory), by_hand)


def test_no_memory_and_no_statistics_where_there_are_none():
    assert make(SelectiveAttention)(random_tokens()).memory is None
    standard = make(StandardAttention)
    assert standard.selection_statistics(random_tokens()) is None
    assert standard.memory_loss_eps == 0.0


def test_statistics_leave_no_trace():
    """No gradient, no change of a compiled or checkpointed model's next step, flags off again after a fault."""
    model, tokens = make(checkpoint_activations=True), random_tokens()
    before = model(tokens).logits
    model.selection_statistics(tokens)
    assert torch.equal(model(tokens).logits, before)
    with pytest.raises(UserError):
        model.selection_statistics(random_tokens(n=25))
    for block in model.blocks:
        assert block.attention.record_statistics is False
        assert block.attention.statistics is None


# ---- types, compile, checkpointing ----


def gradients(model, tokens, ids=None):
    output = model(tokens[:, :-1], None if ids is None else ids[:, :-1])
    loss = functional.cross_entropy(output.logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    if output.memory is not None:
        loss = loss + 0.1 * memory_loss(output.memory)
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_checkpointed_gradients_are_equal(kind, positions):
    """The same operations run again: bit for bit."""
    ids = torch.tensor([[0] * 6 + [1] * 10] * 2)
    results = [
        gradients(make(kind, positions=positions, checkpoint_activations=on), random_tokens(), ids)
        for on in (False, True)
    ]
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_checkpointing_recomputes():
    """Each layer's MLP runs once without and twice with checkpointing: the option does what it says."""
    calls = []
    for on in (False, True):
        model = make(checkpoint_activations=on)
        for block in model.blocks:
            block.mlp.register_forward_pre_hook(lambda *_, on=on: calls.append(on))
        gradients(model, random_tokens())
    assert (calls.count(False), calls.count(True)) == (2, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "checkpointed"), [(StandardAttention, False), (WITH_MEMORY, False), (WITH_MEMORY, True)]
)
def test_compiled_equals_plain(kind, checkpointed):
    """As one graph, in place: the names of the parameters stay. aot_eager needs no compiler on the machine."""
    tokens, ids = random_tokens(), torch.tensor([[0] * 6 + [1] * 10] * 2)
    options = {"positions": "rope", "n_layers": 1, "checkpoint_activations": checkpointed}
    plain, compiled = make(kind, **options), make(kind, **options)
    torch._dynamo.reset()
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for documents in (None, ids):
        loss, plain_gradients = gradients(plain, tokens, documents)
        compiled_loss, compiled_gradients = gradients(compiled, tokens, documents)
        # The same float32 operations, decomposed: sums of at most 40 terms may be ordered otherwise.
        torch.testing.assert_close(compiled_loss, loss, rtol=1e-6, atol=1e-6)
        for name in plain_gradients:
            torch.testing.assert_close(compiled_gradients[name], plain_gradients[name], rtol=1e-4, atol=1e-6)
    statistics = compiled.selection_statistics(tokens)
    assert (statistics is None) == (kind is StandardAttention)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_autocast_is_near_float32(kind):
    model, tokens = make(kind, positions="rope"), random_tokens()
    exact = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(tokens)
    assert rounded.logits.dtype == torch.bfloat16
    # bfloat16 has 8 bits; some dozens of roundings in sequence.
    torch.testing.assert_close(rounded.logits.float(), exact.logits, rtol=0.05, atol=0.02)
    if exact.memory is not None:
        assert rounded.memory.dtype == torch.float32


def test_positions_stay_distinct_in_a_bfloat16_model():
    """Of 1,024 positions no two become one: neither the rotary tables a layer gets nor the learned rows."""
    caught = []
    model = make(positions="rope", context_length=1024, n_layers=1).bfloat16()
    model.blocks[0].attention.register_forward_hook(lambda module, args, out: caught.append(args[1]))
    with torch.no_grad():
        model(torch.zeros(1, 1024, dtype=torch.long))
    assert caught[0].cos.dtype == torch.float32
    assert len(torch.cat(caught[0], dim=-1).unique(dim=0)) == 1024
    learned = make(context_length=1024).bfloat16()
    assert len(learned.position_embedding.weight.float().unique(dim=0)) == 1024


def test_tied_embeddings_are_one_matrix():
    model = make(tie_embeddings=True)
    assert "head.weight" not in model.state_dict()
    hidden = []
    model.norm.register_forward_hook(lambda module, args, out: hidden.append(out))
    logits = model(random_tokens()).logits
    torch.testing.assert_close(logits, hidden[0] @ model.embedding.weight.T)


def test_weights_survive_a_plain_state_dict(tmp_path):
    torch.save(make(seed=1).state_dict(), tmp_path / "weights.pt")
    other = make(seed=2)
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=True)
    assert torch.equal(other(random_tokens()).logits, make(seed=1)(random_tokens()).logits)


# ---- faults ----


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"n_heads": 0}, [r"model\.n_heads=0: expected an integer of at least 1"]),
        ({"depth": 0}, [r"model\.depth=0"]),
        ({"depth": None}, [r"model\.depth=None"]),
        ({"depth": "3"}, [r"model\.depth='3'"]),
        ({"n_layers": -1}, [r"model\.n_layers=-1"]),
        ({"head_dim": 0}, [r"model\.head_dim=0"]),
        ({"d_model": 2.5}, [r"model\.d_model=2\.5"]),
        ({"d_ff": 0}, [r"model\.d_ff=0"]),
        ({"context_length": 1, "depth": 1}, [r"model\.context_length=1: expected an integer of at least 2"]),
        ({"n_heads": 4, "n_kv_heads": 3}, [r"model\.n_kv_heads=3 with model\.n_heads=4"]),
        ({"positions": "roep"}, [r"model\.positions=roep: choose one of learned, rope, none"]),
        ({"positions": "rope", "head_dim": 7}, [r"model\.head_dim=7 with model\.positions=rope"]),
        ({"positions": "rope", "rope_base": 0}, [r"model\.rope_base=0"]),
        (
            {"depth": 3, "context_length": 0, "positions": "x", "n_layers": 0, "attention": {"selection_head": 5}},
            [
                r"model\.context_length=0",
                r"model\.positions=x",
                r"model\.n_layers=0",
                r"attention\.selection_head=5 with model\.n_heads=3: the selection head must be one of 0\.\.2",
            ],
        ),
        ({"attention": {"selction_head": 1}}, ["selction_head.*options of SelectiveAttention are .*selection_head"]),
        ({"attention": {"kernel": "fast"}}, [r"attention\.kernel=fast"]),
    ],
)
def test_bad_options_are_named_all_at_once(options, messages):
    options = dict(options)
    attention = functools.partial(SelectiveAttention, **options.pop("attention", {}))
    with pytest.raises(UserError) as error:
        Transformer(VOCAB, attention, **{"depth": 2, **options})
    for message in messages:
        assert pytest.raises(UserError, match=message).matches(error.value), error.value
    assert len(str(error.value).split("; ")) >= len(messages)


@pytest.mark.parametrize("positions", ["learned", "rope", "none"])
def test_an_input_longer_than_the_context_is_refused(positions):
    model = make(positions=positions)
    assert model(random_tokens(n=24)).logits.shape == (2, 24, VOCAB)
    with pytest.raises(UserError, match=r"25 tokens with model\.context_length=24"):
        model(random_tokens(n=25))


def test_one_token_is_an_input():
    assert make(WITH_MEMORY)(random_tokens(n=1)).memory.flatten().tolist() == [1.0] * 4


@pytest.mark.parametrize("tied", [False, True])
def test_initial_values_follow_the_table(tied):
    model = Transformer(
        400, functools.partial(StandardAttention), depth=2, head_dim=32, context_length=64, tie_embeddings=tied
    )
    model.init_weights(3)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
            continue
        std = 0.1 if name == "embedding.weight" and not tied else 0.02
        # the standard error of a sample's standard deviation is std / sqrt(2 n); six of them
        assert parameter.std().item() == pytest.approx(std, rel=6 / (2 * parameter.numel()) ** 0.5), name
        assert abs(parameter.mean().item()) < 6 * std / parameter.numel() ** 0.5, name
