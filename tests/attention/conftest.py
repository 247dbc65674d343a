"""The oracle of selective attention: PAPER's equations as loops over plain Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor


def _softmax(logits: list[float]) -> list[float]:
    """By IEEE: a NaN or +inf logit makes the whole row NaN (inf - inf)."""
    if any(math.isnan(x) for x in logits) or math.inf in logits:
        return [math.nan] * len(logits)
    largest = max(logits)
    powers = [math.exp(x - largest) for x in logits]
    return [p / sum(powers) for p in powers]


def triple_loop(q, k, v, *, selection_head=0, document_ids=None, memory_tau=1.0) -> tuple[Tensor, Tensor, Tensor]:
    """out [b,h,n,d], F [b,n,n] and M [b,n] in float64. F between documents is given as 0."""
    b, h, n, d = q.shape
    group = h // k.shape[1]
    q, k, v = q.double().tolist(), k.double().tolist(), v.double().tolist()
    documents = [[0] * n for _ in range(b)] if document_ids is None else document_ids.tolist()
    out = torch.zeros(b, h, n, d, dtype=torch.float64)
    all_F = torch.zeros(b, n, n, dtype=torch.float64)
    memory = torch.zeros(b, n, dtype=torch.float64)
    for x in range(b):

        def logit(head, i, j, x=x):
            return sum(q[x][head][i][c] * k[x][head // group][j][c] for c in range(d)) / math.sqrt(d)

        def S(i, j, x=x, logit=logit):
            document = documents[x]
            first_of_document = j == 0 or document[j - 1] != document[j]
            if j >= i or first_of_document or document[i] != document[j]:
                return 0.0
            L = logit(selection_head, i, j)
            return L if L > 0 or math.isnan(L) else 0.0

        for i in range(n):
            keys = [j for j in range(i + 1) if documents[x][j] == documents[x][i]]
            F = {j: sum((S(earlier, j) for earlier in range(i)), start=0.0) for j in keys}
            for j in keys:
                all_F[x, i, j] = F[j]
            memory[x, i] = len(keys) - sum(min(F[j], memory_tau) / memory_tau for j in keys)
            for head in range(h):
                weights = _softmax([logit(head, i, j) - F[j] for j in keys])
                for c in range(d):
                    values = (w * v[x][head // group][j][c] for w, j in zip(weights, keys, strict=True))
                    out[x, head, i, c] = sum(values)
    return out, all_F, memory


@pytest.fixture(name="triple_loop", scope="session")
def triple_loop_fixture():
    """The oracle as a function of q, k, v and the kernel's keyword arguments."""
    return triple_loop


def random_qkv(b=2, h=3, h_kv=None, n=6, d=4, *, seed=0, dtype=torch.float64, scale=1.5):
    """q [b,h,n,d], k and v [b,h_kv,n,d], normal with standard deviation `scale` (so that F matters)."""
    generator = torch.Generator().manual_seed(seed)
    heads = (h, h_kv or h, h_kv or h)
    return [(torch.randn(b, x, n, d, generator=generator, dtype=torch.float64) * scale).to(dtype) for x in heads]


@pytest.fixture(name="random_qkv", scope="session")
def random_qkv_fixture():
    """Seeded random inputs of a kernel."""
    return random_qkv
