"""The selective module: its options, its statistics, its memory term."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch

from selmodel.attention import SelectiveAttention
from selmodel.attention.kernels import announce
from selmodel.attention.kernels.eager import selective_attention
from selmodel.attention.selection import accumulate, selection_scores
from selmodel.errors import UserError


def layer_input(n=9):
    return torch.randn(2, n, 12, generator=torch.Generator().manual_seed(0)) * 2


def make(**options):
    torch.manual_seed(0)
    layer = SelectiveAttention(12, 4, 6, 2, **options)
    for parameter in layer.parameters():  # logits of a size at which selection shows
        parameter.data.mul_(3)
    return layer


@pytest.mark.parametrize("selection_head", [0, 1, 3])
def test_attends_by_the_kernel_with_its_options(selection_head):
    layer = make(selection_head=selection_head, memory_loss={"eps": 0.1, "tau": 2.0})
    q, k, v = layer.project(layer_input())
    ids = torch.tensor([[0] * 4 + [1] * 5] * 2)
    for documents in (None, ids):
        out, memory = layer.attend(q, k, v, documents)
        expected = selective_attention(q, k, v, selection_head=selection_head, document_ids=documents, memory_tau=2.0)
        torch.testing.assert_close(out, expected[0])  # another kernel: other sums of the same float32 numbers
        torch.testing.assert_close(memory, expected[1])
        assert torch.equal(
            make(kernel="eager", selection_head=selection_head).attend(q, k, v, documents)[0], expected[0]
        )


@pytest.mark.parametrize("selection_head", [5, 3, -1, 1.0, "0"])
def test_the_selection_head_must_exist(selection_head):
    message = rf"attention\.selection_head={selection_head} with model\.n_heads=3: .* one of 0\.\.2"
    with pytest.raises(UserError, match=message):
        SelectiveAttention(12, 3, 4, selection_head=selection_head)


def test_an_unknown_kernel_is_refused_at_construction():
    with pytest.raises(UserError, match=r"attention\.kernel=tritom"):
        make(kernel="tritom")


@pytest.mark.parametrize(
    ("live_keys", "kept"), [("auto", "auto"), ("off", "off"), (False, "off"), (30, 30.0), (2.5, 2.5)]
)
def test_live_keys(live_keys, kept):
    """False is how YAML reads off."""
    layer = make(live_keys=live_keys)
    assert layer.live_keys == kept
    assert layer.options().get("live_keys") == (kept if isinstance(kept, float) else None)  # auto and off: one function


@pytest.mark.parametrize("live_keys", ["on", "", 0, -3.0, True, None, float("nan"), float("inf"), "30"])
def test_bad_live_keys_are_named(live_keys):
    with pytest.raises(UserError, match=r"attention\.live_keys=.*: expected off, auto, or the F"):
        make(live_keys=live_keys)


def test_the_eager_kernel_takes_no_threshold():
    with pytest.raises(
        UserError, match=r"attention\.live_keys=30\.0 with attention\.kernel=eager.*choose another kernel"
    ):
        make(live_keys=30, kernel="eager")


def test_a_threshold_reaches_the_kernel():
    """F = 0.001 is passed by nearly every key at once: all but <BOS> and the block's own 64 are left out."""
    x = torch.randn(1, 130, 12, generator=torch.Generator().manual_seed(0)) * 2
    exact, auto, low = (make(live_keys=live_keys)(x)[0] for live_keys in ("off", "auto", 0.001))
    torch.testing.assert_close(auto, exact)
    torch.testing.assert_close(low[:, :64], exact[:, :64])
    assert (low[:, 64:] - exact[:, 64:]).abs().max() > 1e-3


@pytest.mark.parametrize("memory_loss", [None, {"eps": 0.0, "tau": 1.0}, {"eps": 0}, {"eps": None}])
def test_memory_loss_off(memory_loss):
    layer = make(memory_loss=memory_loss)
    assert layer.memory_loss_eps == 0.0
    assert layer(layer_input())[1] is None


def test_memory_loss_on():
    layer = make(memory_loss={"eps": 0.02})
    assert (layer.memory_loss_eps, layer.memory_loss_tau) == (0.02, 1.0)
    memory = layer(layer_input())[1]
    assert memory.shape == (2, 9)
    memory.sum().backward()
    assert layer.wq.weight.grad[:6].abs().sum() > 0  # the selection head
    assert layer.wq.weight.grad[6:].abs().sum() == 0  # no other


@pytest.mark.parametrize(
    ("memory_loss", "message"),
    [
        ({"eps": -0.1}, r"attention\.memory_loss\.eps=-0\.1"),
        ({"eps": float("nan")}, r"attention\.memory_loss\.eps=nan"),
        ({"eps": 0.1, "tau": 0}, r"attention\.memory_loss\.tau=0"),
        ({"eps": 0.1, "tua": 1}, r"attention\.memory_loss=.*tua.*expected eps"),
        ({"tau": 1.0}, r"attention\.memory_loss=.*expected eps"),
        (0.1, r"attention\.memory_loss=0\.1: expected"),
        ({"eps": "a"}, r"attention\.memory_loss\.eps='a'"),
    ],
)
def test_bad_memory_loss_is_named(memory_loss, message):
    with pytest.raises(UserError, match=message):
        make(memory_loss=memory_loss)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("selection_head", [1, 2])
def test_statistics_are_those_of_the_layers_own_F(documents, selection_head):
    layer = make(selection_head=selection_head)
    ids = torch.tensor([[0] * 4 + [1] * 5] * 2) if documents else None
    layer(layer_input(), None, ids)
    assert layer.statistics is None  # off by default
    layer.record_statistics = True
    layer(layer_input(), None, ids)
    q, k, _ = layer.project(layer_input())
    key_head = {1: 0, 2: 1}[selection_head]  # four query heads on two key heads
    logits = q[:, selection_head] @ k[:, key_head].mT / 6**0.5
    F = accumulate(selection_scores(logits, ids))
    causal = torch.ones(9, 9).tril().bool().expand(2, 9, 9)
    if documents:
        causal = causal & (ids[:, :, None] == ids[:, None])
    torch.testing.assert_close(layer.statistics.mean_F, F[causal].mean())
    torch.testing.assert_close(layer.statistics.share_F_above_1, (F[causal] > 1).float().mean())
    assert 0 < layer.statistics.share_F_above_1 < 1
    assert not layer.statistics.mean_F.requires_grad


def test_statistics_do_not_change_the_output():
    layer = make()
    plain = layer(layer_input())[0]
    layer.record_statistics = True
    assert torch.equal(layer(layer_input())[0], plain)


def test_copies_and_pickles():
    """Trainers copy modules and send them to other processes."""
    layer = make(memory_loss={"eps": 0.1})
    expected = layer(layer_input())[0]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(layer_input())[0], expected)


def test_the_kernel_is_chosen_anew_when_the_module_moves(monkeypatch):
    devices = []
    layer = make()
    kernel = layer.kernel
    monkeypatch.setattr(
        "selmodel.attention.selective.resolve_kernel",
        lambda name, device, **inputs: devices.append((name, str(device), inputs)) or kernel,
    )
    layer.to("meta", torch.bfloat16)
    assert devices == [("auto", "meta", {"dtype": torch.bfloat16, "head_dim": 6})]


def test_says_once_by_which_kernel_it_attends(caplog):
    """When it attends, not when it is built: models are built on the CPU and then moved."""
    announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="selmodel"):
        layers = [make(), make()]
        assert caplog.messages == []
        for layer in layers:
            layer(layer_input())
    assert caplog.messages == ["selective attention: blockwise (the fastest on cpu), live keys auto"]
