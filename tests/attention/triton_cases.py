"""The Triton kernels against the eager kernel in float64, on any device on which they run.

Not collected by itself: test_triton_interpreter.py runs it in a process of its own, since TRITON_INTERPRET must be
set before triton is imported. Interpreted kernels take tiles of 16, so that short sequences have many.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from selmodel.attention.kernels import blockwise, triton_config, triton_op
from selmodel.attention.kernels.eager import selective_attention as eager
from selmodel.attention.kernels.triton_config import Launch, Tiles
from selmodel.attention.kernels.triton_op import selective_attention
from selmodel.attention.selection import accumulate, attended_pairs, selection_scores

NAMES = ("out", "memory", "dq", "dk", "dv")
# float32 sums of up to 100 terms, and gradients that pass through two of them.
TOLERANCE = 5e-6

SMALL = Tiles(
    queries=32,
    line=16,
    carry=Launch(16, 4, 1),
    forward=Launch(16, 4, 1, heads=2, blocks=True),
    key_gradient=Launch(16, 4, 1),
    query_gradient=Launch(16, 4, 1, heads=2, blocks=True),
    selection_gradient=Launch(16, 4, 1),
)
# Other shapes of tiles: keys before and after queries, a selection tile of a whole block, another single-head launch.
WIDE = Tiles(
    queries=32,
    line=16,
    carry=Launch(64, 4, 1),
    forward=Launch(64, 4, 1, heads=2, blocks=True),
    key_gradient=Launch(64, 4, 1),
    query_gradient=Launch(64, 4, 1, blocks=True),
    selection_gradient=Launch(32, 4, 1, blocks=True),
    forward_single=Launch(32, 4, 1, blocks=True),
)


@pytest.fixture
def device() -> str:
    return "cpu" if triton_config.interpreted() else "cuda"


@pytest.fixture(autouse=True)
def tiles(monkeypatch, request):
    """Small tiles in the interpreter, or those of `tiles` in the test's parameters; the table's on a GPU."""
    chosen = getattr(request, "param", SMALL)
    if triton_config.interpreted():
        monkeypatch.setattr(triton_config, "tiles_for", lambda q: chosen)
    return chosen


@pytest.fixture
def true_bfloat16(monkeypatch):
    """Correct two faults of the interpreter: it multiplies bfloat16 as integers, and truncates when rounding to it."""
    if not triton_config.interpreted():
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def widen(data):
        return torch.from_numpy(data.astype("int32") << 16).view(torch.float32).numpy()

    def cast_impl(self, source, to):
        kinds = source.dtype.scalar, to.scalar
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(source.data.astype("float32")).bfloat16().view(torch.int16)
            return TensorHandle(rounded.numpy().view("uint16"), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(widen(source.data), tl.float32)
        return cast(self, source, to)

    def create_dot(self, a, b, total, *options):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (TensorHandle(widen(x.data), tl.float32) for x in (a, b))
        return dot(self, a, b, total, *options)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    monkeypatch.setattr(
        InterpreterBuilder, "create_fp_to_fp", lambda self, source, to, mode: cast_impl(self, source, to)
    )
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def block_of(q) -> int:
    return triton_config.tiles_for(q).queries


def problem(device, b=2, h=2, h_kv=None, n=50, d=16, *, dtype=torch.float32, scale=1.5, documents=False, seed=0):
    """q, k, v in `dtype`, gradients of out and memory in float64, and document ids or None."""
    generator = torch.Generator().manual_seed(seed)
    heads = (h, h_kv or h, h_kv or h)
    qkv = [torch.randn(b, x, n, d, generator=generator, dtype=torch.float64) * scale for x in heads]
    grads = torch.randn(b, h, n, d, generator=generator).double(), torch.randn(b, n, generator=generator).double()
    ids = (torch.rand(b, n, generator=generator) < 0.1).cumsum(1) if documents else None
    on = [x.to(device) for x in grads]
    return [x.to(dtype).to(device) for x in qkv], on, (None if ids is None else ids.to(device))


def differentiate(function, qkv, grads, **options):
    """{name: value} of out, memory if there is one, and the gradients of q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    out, memory = function(q, k, v, **options)
    outputs = [out] if memory is None else [out, memory]
    directions = [g.to(x.dtype) for g, x in zip(grads, outputs, strict=False)]
    found = torch.autograd.grad(outputs, (q, k, v), directions)
    values = (out.detach(), None if memory is None else memory.detach(), *found)
    return {name: x for name, x in zip(NAMES, values, strict=True) if x is not None}


def relative_error(actual, expected) -> float:
    """Largest difference, relative to the largest number, of which there are none below 1e-6."""
    return ((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


def assert_equal(actual, expected, tolerance=TOLERANCE) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert all(error <= tolerance for error in errors.values()), errors


def double(qkv):
    return [x.double() for x in qkv]


SHAPES = [
    # b, h, h_kv, n, d, selection_head
    (2, 2, 2, 50, 16, 0),
    (1, 3, 3, 33, 24, 2),  # an odd number of heads, padded features
    (2, 4, 2, 37, 16, 3),
    (1, 4, 1, 64, 32, 1),
    (1, 2, 2, 16, 20, 1),  # one line; a head size of unaligned rows
    (1, 2, 1, 7, 40, 0),
    (1, 2, 2, 97, 16, 1),  # more than one tile of WIDE
]


@pytest.mark.parametrize("tiles", [SMALL, WIDE], indirect=True, ids=["small", "wide"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("documents", "tau"), [(False, None), (True, 1.0), (False, 2.5)])
def test_equals_eager(device, shape, documents, tau):
    b, h, h_kv, n, d, selection_head = shape
    qkv, grads, ids = problem(device, b, h, h_kv, n, d, documents=documents, seed=n)
    options = {"selection_head": selection_head, "document_ids": ids, "memory_tau": tau}
    actual = differentiate(selective_attention, qkv, grads, **options)
    assert_equal(actual, differentiate(eager, double(qkv), grads, **options))
    assert actual["out"].dtype == torch.float32
    assert actual["out"].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("tau", [None, 1.0])
@pytest.mark.parametrize("live_keys", ["off", "auto", 3.0])
def test_one_position(device, tau, live_keys):
    """out = v, M = 1; q and k have no gradient, the weight being 1 whatever they are."""
    qkv, grads, _ = problem(device, n=1)
    actual = differentiate(selective_attention, qkv, grads, memory_tau=tau, live_keys=live_keys)
    torch.testing.assert_close(actual["out"], qkv[2])
    torch.testing.assert_close(actual["dv"], grads[0].float())
    assert actual["dq"].abs().max() < 1e-5
    assert actual["dk"].abs().max() < 1e-5
    assert tau is None or actual["memory"].tolist() == [[1.0], [1.0]]


def test_strided_inputs(device):
    """As projections give them, a gradient of expanded ones, and a last dimension that is not contiguous."""
    qkv, grads, _ = problem(device, h=4, h_kv=2, n=37)
    expected = differentiate(eager, double(qkv), [torch.ones_like(grads[0])])
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    one = torch.ones((), device=device).expand(grads[0].shape)
    assert_equal(differentiate(selective_attention, swapped, [one]), expected)
    backwards = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in qkv]
    assert_equal(differentiate(selective_attention, backwards, [one]), expected)


def test_a_huge_F_gives_weight_0(device):
    """Every query asks with S = 1e4 that every key be masked: what is left is <BOS>, itself, and the key before."""
    qkv, grads, _ = problem(device, h=2, n=40)
    q, k, v = qkv
    q[:, 0], k[:, 0] = 50.0, 50.0  # logits of the selection head: 16 * 2500 / 4 = 1e4
    actual = differentiate(selective_attention, qkv, grads, memory_tau=1.0)
    assert all(x.isfinite().all() for x in actual.values())
    expected_memory = torch.tensor([1.0, 2.0] + 38 * [3.0], device=device)
    torch.testing.assert_close(actual["memory"], expected_memory.expand(2, -1))
    # Head 1 attends to three keys, by its own logits.
    logits = (q[:, 1] @ k[:, 1].mT).double() / 4
    keep = torch.zeros(40, 40, device=device).bool()
    keep[:, 0] = True
    keep |= torch.ones(40, 40, device=device).tril().triu(-1).bool()
    keep &= torch.ones(40, 40, device=device).tril().bool()
    expected = logits.masked_fill(~keep, -torch.inf).softmax(-1) @ v[:, 1].double()
    assert relative_error(actual["out"][:, 1], expected) < TOLERANCE


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["q of the selection head", "q of the other", "k of the selection head", "v"])
@pytest.mark.parametrize("position", [5, 16, 31])
@pytest.mark.parametrize("live_keys", ["off", "auto"])
def test_bad_numbers_reach_the_rows_they_reach_in_eager(device, value, place, position, live_keys):
    (q, k, v), _, _ = problem(device, b=1, n=40)
    {"q of the selection head": q[0, 0], "q of the other": q[0, 1], "k of the selection head": k[0, 0], "v": v[0, 0]}[
        place
    ][position] = value
    out, memory = selective_attention(q, k, v, memory_tau=1.0, live_keys=live_keys)
    expected, expected_memory = eager(q, k, v, memory_tau=1.0)
    if place == "v":
        # 0 * inf = NaN where eager multiplies masked rows too; kernels must be bad from the position on.
        assert out[0, 0, position:].isfinite().logical_not().all()
    else:
        assert torch.equal(out.isfinite(), expected.isfinite())
        torch.testing.assert_close(out.nan_to_num(), expected.nan_to_num(), rtol=1e-4, atol=1e-4)
    assert torch.equal(memory.isnan(), expected_memory.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [16, 64])
def test_half_precision_is_as_exact_as_the_librarys_attention(device, true_bfloat16, dtype, d):
    """Root mean square errors against float64 on the same inputs, at most twice those of standard attention."""
    qkv, grads, _ = problem(device, h=2, n=64, d=d, dtype=dtype, scale=1.0)

    def standard(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True), None

    def errors(function):
        actual = differentiate(function, qkv, grads[:1])
        expected = differentiate(function if function is standard else eager, double(qkv), grads[:1])
        assert all(x.dtype == dtype for x in actual.values())
        return {x: ((actual[x].double() - expected[x]).norm() / expected[x].norm()).item() for x in actual}

    ours, library = errors(selective_attention), errors(standard)
    assert all(ours[x] <= 2 * library[x] for x in ours), (ours, library)


def test_float16_gradients_beyond_its_range_inside(device):
    """dS sums over heads and later queries: it may leave the range of float16 where the gradients do not."""
    qkv, grads, _ = problem(device, h=4, n=64, dtype=torch.float16, scale=0.5)
    actual = differentiate(selective_attention, qkv, [grads[0] * 2000])
    expected = differentiate(eager, double(qkv), [grads[0] * 2000])
    assert_equal(actual, expected, tolerance=0.01)


# ---- live keys


def masked_by_blocks(q, k, v, thresholds, block, *, selection_head=0, document_ids=None, memory_tau=1.0):
    """Full attention in which a key is out (-inf, no votes) from the first block at whose first row F >= threshold."""
    b, h, n, d = q.shape
    logits = q @ k.repeat_interleave(h // k.shape[1], 1).mT * d**-0.5
    S = selection_scores(logits[:, selection_head], document_ids)
    dead = torch.zeros(b, n, dtype=torch.bool, device=q.device)
    carry = q.new_zeros(b, n)
    rows_F, rows_dead = [], []
    for first in range(0, n, block):
        dead = dead | (carry.detach() >= thresholds)
        votes = S[:, first : first + block].masked_fill(dead[:, None], 0.0)
        F = carry[:, None] + accumulate(votes)
        rows_F.append(F)
        rows_dead.append(dead[:, None].expand_as(F))
        carry = carry + votes.sum(1)
    F, dead = torch.cat(rows_F, 1), torch.cat(rows_dead, 1)
    attended = attended_pairs(n, n, document_ids, device=q.device)
    out = (logits - F[:, None]).masked_fill(~(attended & ~dead)[:, None], -torch.inf).softmax(-1)
    out = out @ v.repeat_interleave(h // k.shape[1], 1)
    gone = (F.clamp(max=memory_tau) / memory_tau).masked_fill(~attended, 0.0).sum(-1)
    memory = attended.sum(-1) - gone
    return out, memory, (dead & attended).double().mean().item()


@pytest.mark.parametrize("tiles", [SMALL, WIDE], indirect=True, ids=["small", "wide"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("h", "h_kv", "selection_head"), [(2, 2, 1), (4, 2, 3), (3, 1, 0)])
def test_dead_keys_are_left_out(device, documents, h, h_kv, selection_head):
    """A threshold so low that it changes the result: keys must die exactly where they should."""
    qkv, grads, ids = problem(device, 2, h, h_kv, 100, documents=documents, seed=h)
    options = {"selection_head": selection_head, "document_ids": ids, "memory_tau": 1.0}
    shares = []

    def oracle(q, k, v):
        out, memory, share = masked_by_blocks(q, k, v, q.new_full((2, 100), 1.5), block_of(q), **options)
        shares.append(share)
        return out, memory

    actual = differentiate(selective_attention, qkv, grads, live_keys=1.5, **options)
    assert_equal(actual, differentiate(oracle, double(qkv), grads))
    if triton_config.interpreted():
        assert shares[0] > (0.005 if documents else 0.2)  # of all n * n pairs
        off = differentiate(selective_attention, qkv, grads, **options)
        assert relative_error(actual["out"], off["out"].double()) > 1e-3


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("tau", [None, 1.0])
def test_auto_equals_off(device, documents, tau):
    """Keys die under the proven bound, and nothing that float32 resolves changes."""
    qkv, grads, ids = problem(device, 2, 2, 2, 100, scale=2.0, documents=documents)
    options = {"document_ids": ids, "memory_tau": tau}
    actual = differentiate(selective_attention, qkv, grads, live_keys="auto", **options)
    assert_equal(actual, differentiate(eager, double(qkv), grads, **options))


def test_the_lists_of_live_keys(device):
    """Carries set by hand. Blocks of 32 rows in lines of 16; key 1 dies for block 1, key 33 for block 2."""
    from selmodel.attention.kernels import triton_launch

    if not triton_config.interpreted():
        pytest.skip("the sizes are those of SMALL")
    n = 80
    q = torch.zeros(1, 1, n, 16)
    carries = torch.zeros(1, 5, n)
    carries[0, 2:, 1], carries[0, 4:, 33] = 5.0, 4.0
    starts = torch.zeros(1, n, dtype=torch.int32)
    starts[0, 70:] = 70
    call = triton_launch._prepare(q, q, q, starts, torch.full((1, n), 2.0), 0, carries)
    call, stops = triton_launch._with_live_keys(call)
    lists, counts = call.live
    assert counts.tolist() == [[32, 63, 78]]
    assert lists[0, 0, :32].tolist() == list(range(32))
    assert lists[0, 1, :63].tolist() == [0, *range(2, 64)]
    assert lists[0, 2, :78].tolist() == [0, *range(2, 33), *range(34, 80)]
    assert stops[0, [0, 1, 2, 33, 34, 79]].tolist() == [3, 1, 3, 2, 3, 3]
    order = triton_launch._order(call, stops)[0].tolist()
    assert sorted(order) == list(range(n))
    # Lifetimes in blocks: 1 for key 1, key 33 and the last block's, then 2 for the middle block, then 3.
    assert order == [1, 33, *range(64, 80), *[j for j in range(64) if j not in (1, 33)]]


# ---- what surrounds the kernels


@pytest.mark.parametrize("live_keys", ["off", 1.5])
@pytest.mark.parametrize("tau", [None, 1.0])
def test_deterministic_backward(device, monkeypatch, live_keys, tau):
    """The path without atomic additions, in more than one chunk of queries, gives the same gradients."""
    from selmodel.attention.kernels import triton_launch

    qkv, grads, ids = problem(device, 2, 4, 2, 70, documents=True)
    options = {"document_ids": ids, "memory_tau": tau, "live_keys": live_keys, "selection_head": 3}
    expected = differentiate(selective_attention, qkv, grads, **options)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(triton_launch, "STORED_NUMBERS", 2 * 70 * 32)
    first = differentiate(selective_attention, qkv, grads, **options)
    assert_equal(first, {name: x.double() for name, x in expected.items()})
    again = differentiate(selective_attention, qkv, grads, **options)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("tau", [None, 1.0])
@pytest.mark.parametrize("documents", [False, True])
def test_the_operators_are_registered_rightly(device, tau, documents):
    """Schema, fake tensors, autograd registration, and the same under AOT dispatch; strides included."""
    (q, k, v), grads, ids = problem(device, 1, 4, 2, 40, documents=documents)
    starts = None if ids is None else triton_op.first_positions(ids)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(triton_op.triton_forward, (*inputs, starts, None, 1, tau))
    thresholds = torch.full((1, 40), 2.0, device=device)
    torch.library.opcheck(triton_op.triton_forward, (*inputs, starts, thresholds, 1, tau))
    with torch.no_grad():
        out, lse, carries, _ = triton_op.triton_forward(*inputs, starts, None, 1, tau)
        d_memory = None if tau is None else grads[1].float()
        args = (grads[0].float(), d_memory, *inputs, out, lse, carries, starts, None, 1, tau)
        torch.library.opcheck(triton_op.triton_backward, args, test_utils=("test_schema", "test_faketensor"))


def test_compiles_without_a_graph_break(device):
    """Traced whole, forward and backward, and equal to the plain call; compiled code itself is not at issue here."""
    qkv, grads, ids = problem(device, 1, 2, 2, 40, documents=True)

    def function(q, k, v, **options):
        out, memory = selective_attention(q * 1.5, k, v, document_ids=ids, memory_tau=1.0, live_keys="auto")
        return out.transpose(1, 2).flatten(2).unflatten(2, (2, 16)).transpose(1, 2), memory

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual = differentiate(compiled, qkv, grads)
    expected = differentiate(function, qkv, grads)
    assert_equal(actual, {name: x.double() for name, x in expected.items()}, tolerance=1e-6)


def test_only_one_output_may_have_a_gradient(device):
    qkv, grads, _ = problem(device, n=20)
    q, k, v = (x.requires_grad_() for x in qkv)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    for index in (0, 1):
        output = selective_attention(q, k, v, memory_tau=1.0)[index]
        expected = eager(*wide, memory_tau=1.0)[index]
        found = torch.autograd.grad(output.sum(), (q, k, v), allow_unused=True)
        wanted = torch.autograd.grad(expected.sum(), wide, allow_unused=True)
        for x, y in zip(found, wanted, strict=True):
            assert relative_error(x, torch.zeros_like(x).double() if y is None else y) < TOLERANCE


def test_autocast_changes_nothing(device):
    (q, k, v), _, _ = problem(device, n=20)
    expected, _ = selective_attention(q, k, v)
    with torch.autocast(device, torch.bfloat16):
        out, _ = selective_attention(q, k, v)
    assert torch.equal(out, expected)


def test_agrees_where_it_is_checked_before_use(device, true_bfloat16):
    """The check that precedes an automatic choice passes for kernels that are right."""
    assert triton_op.disagreement(blockwise.selective_attention, device) is None
