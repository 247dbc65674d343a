"""The blockwise kernel against the eager one: outputs, the memory term and every gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from selmodel.attention.kernels import blockwise, blockwise_tiles
from selmodel.attention.kernels.blockwise import selective_attention
from selmodel.attention.kernels.eager import selective_attention as eager
from selmodel.attention.live import death_thresholds
from selmodel.attention.selection import accumulate, attended_pairs, selection_scores

RELATIVE_ERROR = {torch.float64: 1e-10, torch.float32: 1e-5}
NAMES = ("out", "memory", "d_q", "d_k", "d_v")


@pytest.fixture(params=[1, 4, 16, 64])
def rows(request, monkeypatch):
    """Queries in a block: many blocks, blocks that do not divide n, and one block larger than n."""
    monkeypatch.setattr(blockwise, "CPU_ROWS", request.param)
    return request.param


def document_ids(b, n, seed=0):
    """Documents of random lengths, other ones in each sequence; a document's id says nothing of its place."""
    g = torch.Generator().manual_seed(seed)
    place = torch.randint(0, 5, (b, n), generator=g).cumsum(1).div(19, rounding_mode="floor")
    return torch.randperm(n + 1, generator=g)[place]


def results(function, q, k, v, **options):
    """out, memory and the gradients of q, k, v under a fixed random loss on out and memory."""
    q, k, v = (
        x.detach().clone().requires_grad_() if x.is_contiguous() else x.detach().requires_grad_() for x in (q, k, v)
    )
    g = torch.Generator().manual_seed(9)
    out, memory = function(q, k, v, **options)
    loss = (out * torch.randn(out.shape, generator=g, dtype=torch.float64).to(out.dtype)).sum()
    if memory is not None:
        loss = loss + (memory * torch.randn(memory.shape, generator=g, dtype=torch.float64).to(memory.dtype)).sum()
    return (out.detach(), memory, *torch.autograd.grad(loss, (q, k, v)))


def assert_close(actual, expected, tolerance):
    """Relative error in the norm, for each of the five results."""
    for name, x, y in zip(NAMES, actual, expected, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            error = (x.double() - y.double()).norm() / y.double().norm().clamp(min=0.1)  # at n = 1 it is 0
            assert error < tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 50])
@pytest.mark.parametrize(("h", "h_kv", "selection_head"), [(1, 1, 0), (3, 3, 2), (4, 2, 3), (4, 1, 1)])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("tau", [None, 1.5])
def test_equals_the_eager_kernel(random_qkv, rows, dtype, n, h, h_kv, selection_head, documents, tau):
    q, k, v = random_qkv(h=h, h_kv=h_kv, n=n, d=8, dtype=dtype, seed=n)
    ids = document_ids(2, n) if documents else None
    options = {"selection_head": selection_head, "document_ids": ids, "memory_tau": tau}
    expected = results(eager, q.double(), k.double(), v.double(), **options)
    assert_close(results(selective_attention, q, k, v, **options), expected, RELATIVE_ERROR[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_eager_kernel_at_a_usual_size(random_qkv, dtype):
    """As the projections give it: memory [b, n, h, d]; more sequences than a tile takes at once."""
    shape = {"b": 5, "h": 8, "h_kv": 4, "n": 300, "d": 64, "dtype": dtype, "scale": 1.0}
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_qkv(**shape))
    assert not q.is_contiguous()
    for live_keys in ("off", "auto"):
        actual = results(selective_attention, q, k, v, selection_head=5, memory_tau=1.0, live_keys=live_keys)
        expected = results(eager, q.double(), k.double(), v.double(), selection_head=5, memory_tau=1.0)
        assert_close(actual, expected, RELATIVE_ERROR[dtype])


def test_gradients_by_finite_differences(random_qkv, monkeypatch):
    monkeypatch.setattr(blockwise, "CPU_ROWS", 2)
    q, k, v = (x.requires_grad_() for x in random_qkv(b=1, h=2, h_kv=1, n=5, d=3, seed=4))

    def function(q, k, v):
        return selective_attention(q, k, v, selection_head=1, memory_tau=1.5)

    assert torch.autograd.gradcheck(function, (q, k, v))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "last dimension strided"])
def test_non_contiguous_inputs(random_qkv, layout):
    q, k, v = random_qkv(n=40, d=8)
    made = {
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
        "expanded": lambda x: x[:, :1].expand(x.shape),
        "last dimension strided": lambda x: x.mT.contiguous().mT,
    }[layout]
    q, k, v = made(q), made(k), made(v)
    assert not q.is_contiguous()
    plain = [x.contiguous() for x in (q, k, v)]
    assert_close(results(selective_attention, q, k, v), results(eager, *plain), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_err_no_more_than_twice_standard_attention(random_qkv, dtype):
    """Against float64 on the same rounded inputs, as scaled_dot_product_attention errs against itself in float64."""
    q, k, v = random_qkv(b=2, h=4, n=200, d=32, dtype=dtype, scale=1.0)

    def standard(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True), None

    wide = [x.double() for x in (q, k, v)]
    exact, allowed = results(eager, *wide), results(standard, *wide)
    actual, standards = results(selective_attention, q, k, v), results(standard, q, k, v)
    for name, x, y, other, other_exact in zip(NAMES, actual, exact, standards, allowed, strict=True):
        if x is not None:
            error = (x.double() - y).norm() / y.norm()
            standard_error = (other.double() - other_exact).norm() / other_exact.norm()
            assert error < 2 * standard_error, f"{name}: {error:.1e} against {standard_error:.1e}"
    assert all(x.dtype == dtype for x in (actual[0], *actual[2:]))


def test_no_autocast_inside(random_qkv):
    q, k, v = random_qkv(dtype=torch.float32, n=70)
    expected = results(selective_attention, q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = results(selective_attention, q, k, v)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True) if x is not None)


def test_twice_the_same_bits(random_qkv):
    q, k, v = random_qkv(b=3, h=4, n=333, d=16, dtype=torch.float32)
    first, second = (results(selective_attention, q, k, v, memory_tau=1.0, live_keys="auto") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("live_keys", ["off", "auto"])
@pytest.mark.parametrize("position", [0, 5, 16, 39])
def test_no_later_token_influences_an_earlier_output(random_qkv, monkeypatch, position, live_keys):
    """Bit for bit without live keys; their bound looks ahead, but what it lets go is below rounding."""
    monkeypatch.setattr(blockwise, "CPU_ROWS", 8)
    q, k, v = random_qkv(n=40, dtype=torch.float32)
    out, memory = selective_attention(q, k, v, memory_tau=1.0, live_keys=live_keys)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, position] = 3.0 - 2.0 * x[:, :, position]
    changed_out, changed_memory = selective_attention(*changed, memory_tau=1.0, live_keys=live_keys)
    assert torch.equal(memory[:, :position], changed_memory[:, :position])
    assert not torch.equal(out[:, :, position:], changed_out[:, :, position:])
    if live_keys == "off":
        assert torch.equal(out[:, :, :position], changed_out[:, :, :position])
    else:
        torch.testing.assert_close(out[:, :, :position], changed_out[:, :, :position])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("live_keys", ["off", "auto", 5.0])
def test_huge_F_gives_weight_exactly_zero(monkeypatch, dtype, live_keys):
    """As in test_eager: every vote is 1e4, so row i is the plain mean of v over <BOS>, i - 1 and i."""
    monkeypatch.setattr(blockwise, "CPU_ROWS", 2)
    monkeypatch.setattr(blockwise_tiles, "GATHER_SPARES", 0)
    n = 6
    q = torch.full((1, 2, n, 1), 100.0, dtype=dtype)
    q[:, 1] = 0.5
    k = torch.full((1, 2, n, 1), 100.0, dtype=dtype)
    k[:, 1] = 0.25
    v = torch.arange(1.0, n + 1).to(dtype).view(1, 1, n, 1).repeat(1, 2, 1, 1)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, memory = selective_attention(q, k, v, memory_tau=1.0, live_keys=live_keys)
    expected = torch.tensor([1.0, 3 / 2, 2.0, 8 / 3, 10 / 3, 4.0])
    torch.testing.assert_close(out[0, 1, :, 0].double(), expected.double(), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert memory.tolist() == [[1.0, 2.0, 3.0, 3.0, 3.0, 3.0]]
    (out.sum() + memory.sum()).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    with torch.no_grad():
        v2 = v.clone()
        v2[:, :, 1] = 60000.0
        changed = selective_attention(q, k, v2, live_keys=live_keys)[0]
    assert torch.equal(changed[:, :, 3:], out[:, :, 3:])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("live_keys", ["off", "auto", 2.0])
@pytest.mark.parametrize(
    ("which", "head", "position"), [("q", 0, 2), ("q", 1, 2), ("q", 0, 0), ("k", 0, 3), ("k", 1, 3), ("k", 0, 0)]
)
def test_nan_and_infinity_propagate_as_in_the_eager_kernel(
    random_qkv, monkeypatch, value, live_keys, which, head, position
):
    """Out and memory are equal entry by entry. So are the gradients where eager's are finite.

    Where eager multiplies NaN by a gradient of 0 above the diagonal, blockwise may not look, and keep a number. But
    no gradient turns finite as a whole: a training step that has gone wrong shows.
    """
    monkeypatch.setattr(blockwise, "CPU_ROWS", 4)
    monkeypatch.setattr(blockwise_tiles, "GATHER_SPARES", 0)
    q, k, v = random_qkv(b=2, h=2, n=11, seed=5)
    clean = selective_attention(q, k, v, memory_tau=3.0, live_keys=live_keys)[0]
    (q if which == "q" else k)[1, head, position, 0] = value
    # Sequence 1, that is: above a threshold set by hand keys are left out of the clean one.
    actual = results(selective_attention, q, k, v, memory_tau=3.0, live_keys=live_keys)
    expected = results(eager, q, k, v, memory_tau=3.0)
    close = {"equal_nan": True, "rtol": 1e-9, "atol": 1e-12}
    for name, x, y in zip(NAMES, actual, expected, strict=True):
        finite = y[1].isfinite() if name.startswith("d_") else torch.ones_like(y[1]).bool()
        torch.testing.assert_close(x[1][finite], y[1][finite], **close, msg=lambda m, name=name: f"{name}: {m}")
        assert finite.all() or not x[1].isfinite().all(), name
    torch.testing.assert_close(actual[0][0], clean[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e9, 1e18, 1e30])
@pytest.mark.parametrize("live_keys", ["off", "auto"])
def test_finite_inputs_that_overflow_do_as_in_the_eager_kernel(random_qkv, monkeypatch, scale, live_keys):
    """Logits of 1e18, F of about 1e37, and infinite logits, in float32."""
    monkeypatch.setattr(blockwise, "CPU_ROWS", 4)
    q, k, v = random_qkv(b=1, h=2, n=11, d=1, dtype=torch.float32, seed=5)
    q, k = q * scale, k * scale
    out, memory = selective_attention(q, k, v, memory_tau=1.0, live_keys=live_keys)
    expected, expected_memory = eager(q, k, v, memory_tau=1.0)
    torch.testing.assert_close(out, expected, equal_nan=True)
    torch.testing.assert_close(memory, expected_memory, equal_nan=True)
    assert expected.isfinite().any() == (scale < 1e30)


# Live keys


def dropping_oracle(q, k, v, *, selection_head, document_ids, memory_tau, thresholds, rows):
    """The definition, with -inf wherever F at the first row of the query's block has reached the key's threshold."""
    b, h, n, d = q.shape
    k, v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    logits = q @ k.mT / d**0.5
    F = accumulate(selection_scores(logits[:, selection_head], document_ids))
    first = torch.arange(n) // rows * rows
    dead = (thresholds[:, None] <= F[:, first]) & (torch.arange(n) < first[:, None])
    pairs = attended_pairs(n, n, document_ids).expand(b, n, n)
    weights = (logits - F[:, None]).masked_fill((~pairs | dead)[:, None], -math.inf).softmax(-1)
    gone = torch.where(dead, memory_tau, F.clamp(max=memory_tau)).masked_fill(~pairs, 0.0).sum(-1) / memory_tau
    return weights @ v, pairs.sum(-1) - gone


@pytest.mark.parametrize("gather", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("threshold", [0.3, 3.0, 8.0])
@pytest.mark.parametrize(("h", "h_kv", "selection_head"), [(3, 3, 0), (4, 2, 3)])
@pytest.mark.parametrize("documents", [False, True])
def test_a_threshold_by_hand_drops_exactly_those_keys(
    random_qkv, monkeypatch, gather, threshold, h, h_kv, selection_head, documents
):
    """Gathered or not, with the gradients; F on both sides of the threshold."""
    rows = 8
    monkeypatch.setattr(blockwise, "CPU_ROWS", rows)
    monkeypatch.setattr(blockwise_tiles, "GATHER_BELOW", gather)
    monkeypatch.setattr(blockwise_tiles, "GATHER_SPARES", 0)
    q, k, v = random_qkv(b=3, h=h, h_kv=h_kv, n=61, d=8, scale=1.2)
    options = {
        "selection_head": selection_head,
        "document_ids": document_ids(3, 61) if documents else None,
        "memory_tau": 0.25,
    }
    thresholds = death_thresholds(q, k, v, threshold, 0.25)
    expected = results(dropping_oracle, q, k, v, **options, thresholds=thresholds, rows=rows)
    assert_close(results(selective_attention, q, k, v, **options, live_keys=threshold), expected, 1e-10)
    off = results(selective_attention, q, k, v, **options)
    if threshold < 1:
        assert (off[0] - expected[0]).norm() > 1e-3 * off[0].norm()  # the threshold does something


def test_only_live_keys_are_looked_at(random_qkv, monkeypatch):
    """A tile holds the block's own keys and those below the threshold, counted by the definition of F."""
    monkeypatch.setattr(blockwise_tiles, "GATHER_SPARES", 0)
    seen = []
    logits = blockwise_tiles.Problem.logits
    monkeypatch.setattr(
        blockwise_tiles.Problem, "logits", lambda self, tile, work: seen.append(tile) or logits(self, tile, work)
    )
    q, k, v = random_qkv(b=2, h=2, n=256, d=16, scale=1.5)
    selective_attention(q, k, v, live_keys=4.0)
    F = accumulate(selection_scores(q[:, 0] @ k[:, 0].mT / 4))
    assert [tile.first for tile in seen] == [0, 64, 128, 192]
    for tile in seen[1:]:
        live = [(F[s, tile.first, : tile.first] < 4.0).nonzero()[:, 0].tolist() for s in range(2)]
        most = max(len(keys) for keys in live)
        assert tile.index.shape == (2, most + 64)  # the two sequences together, the shorter list filled up
        for s in range(2):
            kept = tile.index[s] if tile.dead is None else tile.index[s][~tile.dead[s]]
            assert kept.tolist() == [*live[s], *range(tile.first, tile.last)]
            assert len(live[s]) < tile.first / 2
    assert any(tile.dead is not None for tile in seen)


def test_ended_documents_are_not_looked_at(random_qkv, monkeypatch):
    """Without live keys too: their weight is exactly 0."""
    monkeypatch.setattr(blockwise_tiles, "GATHER_SPARES", 0)
    seen = []
    logits = blockwise_tiles.Problem.logits
    monkeypatch.setattr(
        blockwise_tiles.Problem, "logits", lambda self, tile, work: seen.append(tile) or logits(self, tile, work)
    )
    ids = torch.cat((torch.zeros(1, 70), torch.ones(1, 186)), 1).long()
    selective_attention(*random_qkv(b=1, h=2, n=256), document_ids=ids)
    looked_at = [tile.index[0].tolist() if tile.index is not None else list(range(tile.last)) for tile in seen]
    assert looked_at == [list(range(64)), list(range(128)), list(range(70, 192)), list(range(70, 256))]


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_auto_equals_off_within_rounding(random_qkv, monkeypatch, scale):
    monkeypatch.setattr(blockwise, "CPU_ROWS", 16)
    monkeypatch.setattr(blockwise_tiles, "GATHER_SPARES", 0)
    q, k, v = random_qkv(b=2, h=4, n=400, d=16, scale=scale, dtype=torch.float32)
    exact = results(eager, q.double(), k.double(), v.double())
    off = results(selective_attention, q, k, v)
    auto = results(selective_attention, q, k, v, live_keys="auto")
    for name, x, y, z in zip(NAMES, auto, off, exact, strict=True):
        if x is not None:
            # Not further from the truth than rounding has put it already.
            assert (x - z).norm() < 1.2 * (y - z).norm() + 1e-7 * z.norm(), name


# As an operator


def test_operator_is_registered_as_pytorch_expects(random_qkv):
    """Schema, fake tensors, autograd registration, and tracing with static and dynamic shapes."""
    q, k, v = (x.float().requires_grad_() for x in random_qkv(n=20))
    thresholds = death_thresholds(q, k, v, 3.0)
    for ids, limit, tau in ((None, None, None), (document_ids(2, 20), thresholds, 1.0)):
        torch.library.opcheck(blockwise.blockwise, (q, k, v, ids, limit, 1, tau, 8))


def test_memory_is_linear_in_the_context(random_qkv):
    """The largest allocation while it runs, forward and backward, is a tile or a copy of the inputs."""
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    largest[-1] = max(largest[-1], x.untyped_storage().nbytes())
            return result

    for n in (256, 512, 1024):
        largest.append(0)
        q, k, v = random_qkv(b=1, h=2, n=n, d=8, dtype=torch.float32)
        with Watch():
            results(selective_attention, q, k, v)
    assert largest[2] == 2 * largest[1] == 4 * largest[0]
    assert largest[2] <= 4 * 2 * 1024 * 64  # two heads of 64 rows, of eager's 1024
