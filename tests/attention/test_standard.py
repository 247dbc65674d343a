"""Standard attention against the softmax written out."""

from __future__ import annotations

import pytest
import torch

from selmodel.attention import StandardAttention

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [2, 3, 3, 3, 3, 4]])


@pytest.mark.parametrize("h_kv", [4, 2, 1])
@pytest.mark.parametrize("documents", [False, True])
def test_equals_the_softmax_written_out(random_qkv, h_kv, documents):
    q, k, v = random_qkv(h=4, h_kv=h_kv)
    layer = StandardAttention(8, 4, 4, h_kv)
    ids = DOCUMENTS if documents else None
    out, memory = layer.attend(q, k, v, ids)
    assert memory is None
    for b in range(2):
        for h in range(4):
            for i in range(6):
                keys = [j for j in range(i + 1) if not documents or ids[b, j] == ids[b, i]]
                g = h // (4 // h_kv)
                weights = (k[b, g, keys] @ q[b, h, i] / 2.0).softmax(0)  # sqrt(d) = 2
                torch.testing.assert_close(out[b, h, i], weights @ v[b, g, keys], rtol=1e-12, atol=1e-12)


def test_one_document_is_plain_attention(random_qkv):
    q, k, v = random_qkv()
    layer = StandardAttention(8, 3, 4)
    plain, one = layer.attend(q, k, v, None)[0], layer.attend(q, k, v, torch.zeros(2, 6, dtype=torch.int32))[0]
    torch.testing.assert_close(plain, one, rtol=1e-12, atol=1e-12)


def test_another_document_has_no_influence(random_qkv):
    q, k, v = random_qkv(dtype=torch.float32)
    layer = StandardAttention(8, 3, 4)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    out, _ = layer.attend(q, k, v, ids)
    changed = [torch.cat([x[:, :, :3] * -2 + 1, x[:, :, 3:]], dim=2) for x in (q, k, v)]
    assert torch.equal(layer.attend(*changed, ids)[0][:, :, 3:], out[:, :, 3:])


def test_gradients_through_the_document_mask(random_qkv):
    layer = StandardAttention(8, 2, 3, 1).double()
    inputs = [x.requires_grad_() for x in random_qkv(b=1, h=2, h_kv=1, n=4, d=3)]
    ids = torch.tensor([[0, 1, 1, 1]])
    assert torch.autograd.gradcheck(lambda q, k, v: layer.attend(q, k, v, ids)[0], inputs)
