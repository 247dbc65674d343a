"""The interface: projections, grouped heads, query/key norm, rotation, and a further kind of attention."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional

from selmodel.attention import Attention, SelectiveAttention, StandardAttention
from selmodel.attention.rotary import apply_rotary, rotary_tables
from selmodel.errors import UserError
from selmodel.model import Transformer

KINDS = [StandardAttention, SelectiveAttention]


def layer_input(d_model=12, n=7, b=2):
    return torch.randn(b, n, d_model, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_projections_by_plain_matrices(kind):
    """n_heads * head_dim = 24 beside d_model = 12; head h is rows h * head_dim .. of the matrix."""
    torch.manual_seed(0)
    layer = kind(12, n_heads=4, head_dim=6, n_kv_heads=2)
    x = layer_input()
    q, k, v = layer.project(x)
    assert (q.shape, k.shape, v.shape) == ((2, 4, 7, 6), (2, 2, 7, 6), (2, 2, 7, 6))
    torch.testing.assert_close(q[:, 3], x @ layer.wq.weight[18:24].T)
    torch.testing.assert_close(k[:, 1], x @ layer.wk.weight[6:12].T)
    torch.testing.assert_close(v[:, 1], x @ layer.wv.weight[6:12].T)
    out, memory = layer(x)
    attended = layer.attend(q, k, v, None)[0]
    by_head = sum(attended[:, h] @ layer.wo.weight[:, 6 * h : 6 * h + 6].T for h in range(4))
    torch.testing.assert_close(out, by_head)
    assert memory is None


def test_kinds_have_identical_parameters():
    """Names, shapes and order, so that one initialiser gives both the same values."""
    shapes = [[(name, p.shape) for name, p in kind(12, 4, 6, 2, qk_norm=True).named_parameters()] for kind in KINDS]
    assert shapes[0] == shapes[1]
    assert [name for name, _ in shapes[0]] == ["wq.weight", "wk.weight", "wv.weight", "wo.weight"]


def test_query_key_norm_bounds_the_logits():
    """Every query and key has root mean square 1, whatever the input, so |q·k| / sqrt(d) <= sqrt(d)."""
    torch.manual_seed(0)
    layer = StandardAttention(12, 2, 6, qk_norm=True)
    for scale in (1e-2, 1.0, 1e4):
        q, k, v = layer.project(layer_input() * scale)
        for x in (q, k):
            mean_square = x.square().mean(-1)
            assert (mean_square <= 1 + 1e-6).all()
            assert scale < 1 or (mean_square > 0.99).all()  # the norm's eps pulls tiny ones down
        assert not torch.allclose(v.square().mean(-1), torch.ones(2, 2, 7), rtol=0.05)
        assert ((q @ k.mT).abs() / 6**0.5 <= 6**0.5 * (1 + 1e-6)).all()


def test_rotation_follows_the_norm():
    torch.manual_seed(0)
    plain, normed = StandardAttention(12, 2, 6), StandardAttention(12, 2, 6, qk_norm=True)
    normed.load_state_dict(plain.state_dict())
    x, rotary = layer_input(), rotary_tables(torch.arange(7), 6)
    q, k, _ = plain.project(x)
    turned_q, turned_k, _ = normed.project(x, rotary)
    torch.testing.assert_close(turned_q, apply_rotary(functional.rms_norm(q, (6,), eps=1e-6), rotary))
    torch.testing.assert_close(turned_k, apply_rotary(functional.rms_norm(k, (6,), eps=1e-6), rotary))


@pytest.mark.parametrize("kind", KINDS)
def test_one_type_of_q_k_and_v_under_autocast(kind):
    layer = kind(12, 2, 6, qk_norm=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = layer.project(layer_input(), rotary_tables(torch.arange(7), 6))
        out, _ = layer(layer_input(), rotary_tables(torch.arange(7), 6))
    assert q.dtype == k.dtype == v.dtype == out.dtype == torch.bfloat16


def test_key_heads_must_divide_query_heads():
    with pytest.raises(UserError, match=r"model\.n_kv_heads=2 with model\.n_heads=3"):
        StandardAttention(12, 3, 4, 2)


def test_options_name_what_decides_the_function():
    assert StandardAttention(12, 2, 6).options() == {"kind": "StandardAttention", "qk_norm": False}
    layer = SelectiveAttention(12, 2, 6, qk_norm=True, selection_head=1, memory_loss={"eps": 0.1})
    assert layer.options() == {"kind": "SelectiveAttention", "qk_norm": True, "selection_head": 1}


def test_a_kind_without_attend_is_refused():
    class Unfinished(Attention):
        pass

    with pytest.raises(TypeError, match="attend"):
        Unfinished(12, 2, 6)


class WindowAttention(Attention):
    """Each query sees the last `window` keys. All that a further kind needs: an option and `attend`."""

    def __init__(self, *args, window: int = 4, **options) -> None:
        super().__init__(*args, **options)
        self.window = window

    def attend(self, q, k, v, document_ids):
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask & ~mask.tril(-self.window)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out, None


def test_a_further_kind_of_attention_trains():
    """The next token is the one before the last; a window of 2 sees it, and 60 steps learn it."""
    torch.manual_seed(0)
    kind = functools.partial(WindowAttention, window=2)
    model = Transformer(8, kind, n_layers=1, n_heads=2, head_dim=8, d_model=16, context_length=8)
    model.init_weights(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(60):
        pairs = torch.randint(8, (16, 2), generator=generator)
        tokens = pairs.repeat(1, 4)  # a b a b ...
        logits = model(tokens[:, :-1]).logits[:, 1:]
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(2.08, abs=0.1)  # ln 8
    assert losses[-1] < 0.1
    # A token 2 back counts, one 3 back does not.
    tokens = torch.zeros(1, 6, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 2] = 5
    rows = (model(tokens).logits != model(changed).logits).any(-1)[0]
    assert rows.tolist() == [False, False, True, True, False, False]
