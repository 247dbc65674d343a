"""The eager kernel against loops over plain Python floats, and what no kernel may get wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from selmodel.attention.kernels.eager import selective_attention

# float64 against Python floats: only the order of short sums differs.
EXACT = {"rtol": 1e-12, "atol": 1e-12}

DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2], [0, 3, 3, 3, 3, 3, 3, 3]])


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize(("h", "h_kv", "selection_head"), [(1, 1, 0), (3, 3, 0), (3, 3, 2), (4, 2, 2), (4, 1, 3)])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("tau", [1.0, 2.5])
def test_equals_the_triple_loop(triple_loop, random_qkv, n, h, h_kv, selection_head, documents, tau):
    q, k, v = random_qkv(h=h, h_kv=h_kv, n=n, seed=n)
    options = {"selection_head": selection_head, "document_ids": DOCUMENTS[:, :n] if documents else None}
    out, memory = selective_attention(q, k, v, memory_tau=tau, **options)
    expected, F, expected_memory = triple_loop(q, k, v, memory_tau=tau, **options)
    torch.testing.assert_close(out, expected, **EXACT)
    torch.testing.assert_close(memory, expected_memory, **EXACT)
    if n == 8 and not documents:
        assert (F > 0).sum() > 4  # the comparison sees selection at work


def test_no_memory_unless_asked(random_qkv):
    assert selective_attention(*random_qkv())[1] is None


def test_non_contiguous_inputs(random_qkv):
    """As the projections give them: [b, n, h, d] with head and position swapped."""
    q, k, v = random_qkv()
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not swapped[0].is_contiguous()
    assert torch.equal(selective_attention(*swapped)[0], selective_attention(q, k, v)[0])


@pytest.mark.parametrize("documents", [False, True])
def test_negative_selection_logits_give_standard_attention(random_qkv, documents):
    """Head 1 selects; its queries are positive and the keys of its group negative, so that S = 0."""
    q, k, v = random_qkv(h=4, h_kv=2)
    q[:, 1], k[:, 0] = q[:, 1].abs(), -k[:, 0].abs()
    ids = DOCUMENTS[:, :6] if documents else None
    mask = torch.ones(6, 6).tril().bool()[None, None]
    if documents:
        mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    out, memory = selective_attention(q, k, v, selection_head=1, document_ids=ids, memory_tau=1.0)
    standard = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, standard, **EXACT)
    torch.testing.assert_close(memory, mask.expand(2, 1, 6, 6).sum(-1)[:, 0].double(), **EXACT)


def test_the_selection_head_changes_the_result(random_qkv):
    q, k, v = random_qkv()
    outs = [selective_attention(q, k, v, selection_head=s)[0] for s in range(3)]
    assert not torch.allclose(outs[0], outs[1])
    assert not torch.allclose(outs[1], outs[2])


@pytest.mark.parametrize("position", range(6))
def test_no_later_token_influences_an_earlier_output(random_qkv, position):
    """Bit for bit, for out and for the memory term."""
    q, k, v = random_qkv(dtype=torch.float32)
    out, memory = selective_attention(q, k, v, memory_tau=1.0)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, position] = 3.0 - 2.0 * x[:, :, position]
    changed_out, changed_memory = selective_attention(*changed, memory_tau=1.0)
    assert torch.equal(out[:, :, :position], changed_out[:, :, :position])
    assert torch.equal(memory[:, :position], changed_memory[:, :position])
    assert not torch.equal(out[:, :, position:], changed_out[:, :, position:])


@pytest.mark.parametrize("documents", [False, True])
def test_gradients_by_finite_differences(random_qkv, documents):
    """Of out and of the memory term, with respect to q, k and v; tau large enough to be on both sides of F."""
    q, k, v = (x.requires_grad_() for x in random_qkv(b=1, h=2, h_kv=1, n=5, d=3, seed=4))
    ids = torch.tensor([[0, 0, 1, 1, 1]]) if documents else None

    def function(q, k, v):
        return selective_attention(q, k, v, selection_head=1, document_ids=ids, memory_tau=1.5)

    assert torch.autograd.gradcheck(function, (q, k, v))


def test_gradient_flows_through_F_to_the_selection_head(random_qkv):
    """A loss on head 1 alone reaches the queries of head 0 through F, and no other way."""
    q, k, v = (x.requires_grad_() for x in random_qkv(n=8))
    selective_attention(q, k, v)[0][:, 1].sum().backward()
    assert q.grad[:, 0].abs().sum() > 0
    assert q.grad[:, 2].abs().sum() == 0
    # The votes of the last query act on nobody; query 1 has nobody to mask.
    assert q.grad[:, 0, -1].abs().sum() == 0
    assert q.grad[:, 0, 1].abs().sum() == 0


def test_F_is_accumulated_in_float32_under_bfloat16():
    """Logits of 1/128 at 600 positions: F[i,j] = (i - 1 - j) / 128 for 1 <= j < i, exact in float32.

    M[i] = i + 1 - (i-1)(i-2)/2 / (128 tau) with tau above every F. F kept in bfloat16 (8 bits) would stick at
    2 = 256/128, while the true one reaches 4.66: M[599] would be wrong by hundreds.
    """
    n, tau = 600, 8.0
    q = torch.full((1, 1, n, 1), 2.0**-7, dtype=torch.bfloat16)
    k = v = torch.ones(1, 1, n, 1, dtype=torch.bfloat16)
    out, memory = selective_attention(q, k, v, memory_tau=tau)
    i = torch.arange(n, dtype=torch.float64)
    expected = i + 1 - (i - 1).clamp(min=0) * (i - 2).clamp(min=0) / 2 / (128 * tau)
    assert memory.dtype == torch.float32
    torch.testing.assert_close(memory[0].double(), expected, rtol=1e-6, atol=1e-4)  # sums of 600 in float32
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(random_qkv, dtype):
    """Against float64 on the same rounded inputs the error is that of rounding out to `dtype`, and float32's.

    n = 300 with F in the hundreds: logits, F or softmax in half precision would be wrong in the first digit.
    """
    q, k, v = random_qkv(b=1, h=2, n=300, d=16, dtype=dtype, scale=1.0)
    out, _ = selective_attention(q, k, v)
    exact, _ = selective_attention(q.double(), k.double(), v.double())
    assert out.dtype == dtype
    half_spacing = torch.finfo(dtype).eps / 2
    # float32 sums of F in the hundreds err by about 1e-5 absolutely, and so the weights relatively.
    assert ((out.double() - exact).abs() <= half_spacing * exact.abs() + 1e-4).all()


def test_autocast_does_not_round_the_logits(random_qkv):
    """Under autocast the matrix products of the kernel stay in float32."""
    q, k, v = random_qkv(dtype=torch.float32)
    expected, _ = selective_attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = selective_attention(q, k, v)
    assert torch.equal(out, expected)


def huge_F(dtype):
    """Query 2 of head 0 votes 1e4 against key 1, query 3 1e4 against key 2, and so on: q = k = 100, d = 1."""
    n = 6
    q = torch.full((1, 2, n, 1), 100.0, dtype=dtype)
    q[:, 1] = 0.5
    k = torch.full((1, 2, n, 1), 100.0, dtype=dtype)
    k[:, 1] = 0.25
    v = torch.arange(1.0, n + 1).to(dtype).view(1, 1, n, 1).repeat(1, 2, 1, 1)
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_huge_F_gives_weight_exactly_zero(dtype):
    """Head 1 has equal logits, so row i is the plain mean of v over the keys left: <BOS>, i - 1 and i.

    F[i,j] >= 1e4 for 1 <= j <= i - 2. v = 1, 2, ... 6: rows 1, (1+2)/2, (1+2+3)/3, (1+3+4)/3, (1+4+5)/3, ...
    """
    q, k, v = (x.requires_grad_() for x in huge_F(dtype))
    out, memory = selective_attention(q, k, v, memory_tau=1.0)
    expected = torch.tensor([1.0, 3 / 2, 2.0, 8 / 3, 10 / 3, 4.0])
    torch.testing.assert_close(out[0, 1, :, 0].double(), expected.double(), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert memory.tolist() == [[1.0, 2.0, 3.0, 3.0, 3.0, 3.0]]
    (out.sum() + memory.sum()).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    # Key 1 counts in rows 1 and 2 alone, key 4 in rows 4 and 5, <BOS> in all six. (Exact: weight 0, not 1e-9.)
    with torch.no_grad():
        v2 = v.clone()
        v2[:, :, 1] = 60000.0
        changed = selective_attention(q, k, v2)[0]
    assert torch.equal(changed[:, :, 3:], out[:, :, 3:])
    assert not torch.equal(changed[:, :, 2], out[:, :, 2])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("which", "head", "position"), [("q", 0, 2), ("q", 1, 2), ("q", 0, 0), ("k", 0, 3), ("k", 1, 3), ("k", 0, 0)]
)
def test_nan_and_infinity_propagate_by_ieee(triple_loop, random_qkv, value, which, head, position):
    """Exactly the entries of the plain loops are NaN, and the others are equal: nothing is hidden or spread."""
    q, k, v = random_qkv(b=2, h=2, n=6, seed=5)
    clean, _ = selective_attention(q, k, v)
    (q if which == "q" else k)[1, head, position, 0] = value
    out, memory = selective_attention(q, k, v, memory_tau=1.0)
    expected, _, expected_memory = triple_loop(q, k, v)
    torch.testing.assert_close(out, expected, equal_nan=True, **EXACT)
    torch.testing.assert_close(out[0], clean[0], rtol=0, atol=0)  # the other sequence
    torch.testing.assert_close(out[1, :, :position], clean[1, :, :position], rtol=0, atol=0)  # earlier rows
    if not math.isnan(value):  # min(NaN, tau) has no order that Python and IEEE agree on
        torch.testing.assert_close(memory, expected_memory, equal_nan=True, **EXACT)


def test_an_infinite_vote_removes_the_key(random_qkv):
    """Later rows are those of a key that is not there: F = inf is weight 0, not NaN."""
    q, k, v = random_qkv(b=1, h=2, n=6, d=2, seed=6)
    q[0, 0, 3], k[0, 0] = torch.tensor([math.inf, 0.0]), k[0, 0].abs()  # query 3 votes inf on keys 1, 2
    out, _ = selective_attention(q, k, v)
    v2 = v.clone()
    v2[:, :, 1:3] = 1e6
    assert out[0, 1, 4:].isfinite().all()
    assert torch.equal(selective_attention(q, k, v2)[0][0, 1, 4:], out[0, 1, 4:])


def test_documents_are_apart(random_qkv):
    """Changing document 1 changes out and M of document 2 by exactly 0, and the other way round."""
    q, k, v = random_qkv(n=9, dtype=torch.float32)
    ids = torch.tensor([[0] * 4 + [1] * 5] * 2)
    out, memory = selective_attention(q, k, v, document_ids=ids, memory_tau=1.0)
    for changed_part, kept_part in ((slice(0, 4), slice(4, 9)), (slice(4, 9), slice(0, 4))):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, changed_part] = x[:, :, changed_part] * -3 + 1
        new_out, new_memory = selective_attention(*changed, document_ids=ids, memory_tau=1.0)
        assert torch.equal(new_out[:, :, kept_part], out[:, :, kept_part])
        assert torch.equal(new_memory[:, kept_part], memory[:, kept_part])
        assert not torch.equal(new_out[:, :, changed_part], out[:, :, changed_part])


def test_a_packed_document_equals_the_document_alone(random_qkv):
    """Selection is reset, and the first token of each document takes the place of <BOS>."""
    q, k, v = random_qkv(n=9)
    ids = torch.tensor([[0] * 4 + [1] * 5, [0] * 4 + [7] * 5])
    packed, memory = selective_attention(q, k, v, document_ids=ids, memory_tau=1.0)
    for part in (slice(0, 4), slice(4, 9)):
        alone, alone_memory = selective_attention(q[:, :, part], k[:, :, part], v[:, :, part], memory_tau=1.0)
        torch.testing.assert_close(packed[:, :, part], alone, **EXACT)
        torch.testing.assert_close(memory[:, part], alone_memory, **EXACT)
