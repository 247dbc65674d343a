"""The greedy search against one written without reuse, and what it costs."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from selmodel.attention import SelectiveAttention, StandardAttention
from selmodel.evaluation.budget_search import LayeredLoss, loss_under, search_budgets, search_steps
from selmodel.inference.generation import generate
from selmodel.model import Transformer

N = 20


def make(attention=SelectiveAttention, positions="learned", n_layers=3) -> Transformer:
    """Large wq and wk, so that F and what has left matter."""
    model = Transformer(
        30, attention, n_layers=n_layers, n_heads=2, head_dim=8, d_model=16, context_length=N, positions=positions
    )
    model.init_weights(3)
    for name, parameter in model.named_parameters():
        if "wq" in name or "wk" in name:
            parameter.data.mul_(25)
        elif "wv" in name or "wo" in name or "head" in name:
            parameter.data.mul_(20)
    return model.double().eval()


def batches(model, sizes=(2, 1)):
    """Text that the model itself has written, which it knows best with all keys."""
    generator = torch.Generator().manual_seed(0)

    def text():
        start = torch.zeros(1, dtype=torch.int64)
        tokens = generate(model, start, N, generator=generator)  # N tokens fill the context
        return torch.cat([tokens, torch.randint(0, 30, (1,), generator=generator)])

    return [{"tokens": torch.stack([text() for _ in range(b)])} for b in sizes]


def plain_loss(model, data, budgets, rule=None):
    """Mean cross entropy token by token, each batch in one cache-free pass of the pruned model."""
    total = count = 0
    for batch in data:
        tokens = batch["tokens"]
        logits = model.pruned(tokens[:, :-1], budgets, rule=rule).logits
        total += functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
        count += tokens[:, 1:].numel()
    return total / count


def halfway(model, data, rule=None):
    """A target between the losses with all keys and with two in every layer."""
    return (plain_loss(model, data, [N] * 3, rule) + plain_loss(model, data, [2] * 3, rule)) / 2


def plain_search(model, data, target, step, rule=None):
    """As PAPER.md says it, every trial from the first layer on."""
    budgets, order = [N] * model.n_layers, []
    while True:
        trials = []
        for layer in range(model.n_layers):
            if budgets[layer] > 2:
                lowered = list(budgets)
                lowered[layer] = max(2, budgets[layer] - step)
                trials.append((plain_loss(model, data, lowered, rule), layer, lowered[layer]))
        if not trials or min(trials)[0] > target:
            return budgets, order
        loss, layer, budget = min(trials)
        budgets[layer] = budget
        order.append((layer, budget, loss))


@pytest.mark.parametrize(
    ("attention", "rule", "positions", "step"),
    [
        (SelectiveAttention, None, "learned", 8),
        (SelectiveAttention, None, "rope", 5),
        (SelectiveAttention, "oldest", "rope", 8),
        (StandardAttention, "tova", "learned", 8),
    ],
)
def test_equals_the_search_without_reuse(attention, rule, positions, step):
    model = make(attention, positions)
    data = batches(model)
    target = halfway(model, data, rule)
    budgets, order = plain_search(model, data, target, step, rule)
    loss, rounds = LayeredLoss(model, data, [N] * 3, rule=rule), []
    assert search_budgets(loss, target, [step], rounds.append) == "target"
    assert loss.budgets == budgets
    assert sum(budgets) < 3 * N  # something was lowered
    assert [(one.layer, one.budget) for one in rounds] == [one[:2] for one in order]
    assert [one.loss for one in rounds] == pytest.approx([one[2] for one in order], abs=1e-12)
    assert loss.result.loss == pytest.approx(plain_loss(model, data, budgets, rule), abs=1e-12)


def test_the_figures_are_those_of_whole_passes_to_the_last_bit():
    model = make().float()
    data = batches(model)
    loss = LayeredLoss(model, data, [N, 7, 9])
    assert loss.result == loss_under(model, data, [N, 7, 9])
    trial = loss.lowered(1, 3)
    assert trial.result == loss_under(model, data, [N, 3, 9])
    assert loss.result == loss_under(model, data, [N, 7, 9])  # a trial changes nothing
    loss.accept(trial)
    assert loss.lowered(2, 4).result == loss_under(model, data, [N, 3, 4])


@pytest.mark.parametrize("n_layers", [1, 2, 5])
def test_a_round_computes_the_layers_from_the_one_tried_on(n_layers):
    model = make(n_layers=n_layers)
    calls = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: calls.append(1))
    loss = LayeredLoss(model, batches(model, (2,)), [N] * n_layers)
    calls.clear()
    rounds = []
    search_budgets(loss, math.inf, [N], rounds.append)  # one round for each layer, to 2 keys
    # Of n_layers rounds the first tries all layers, and each further one those that are not at 2 yet.
    assert len(rounds) == n_layers
    open_layers, expected = set(range(n_layers)), 0
    for one in rounds:
        expected += sum(n_layers - layer for layer in open_layers)
        open_layers.remove(one.layer)
    assert len(calls) == expected
    assert loss.layer_passes == expected + n_layers


def test_padding_rows_do_not_count():
    model = make()
    (batch,) = batches(model, (3,))
    padded = {**batch, "weight": torch.tensor([1.0, 1.0, 0.0])}
    cut = {"tokens": batch["tokens"][:2]}
    assert loss_under(model, [padded], [5] * 3).loss == pytest.approx(loss_under(model, [cut], [5] * 3).loss, abs=1e-12)


def test_the_floor():
    model = make()
    loss = LayeredLoss(model, batches(model), [N] * 3)
    assert search_budgets(loss, math.inf, [8]) == "floor"
    assert loss.budgets == [2, 2, 2]


def test_the_target_itself_may_be_reached():
    model = make()
    data = batches(model)
    loss = LayeredLoss(model, data, [N] * 3)
    trials = [loss.lowered(layer, N - 8).result.loss for layer in range(3)]
    rounds = []
    search_budgets(loss, min(trials), [8], rounds.append)
    assert rounds[0].loss == min(trials)


def test_begun_again_it_goes_on_as_it_would_have():
    model = make()
    data = batches(model)
    target = halfway(model, data)
    whole = []
    search_budgets(LayeredLoss(model, data, [N] * 3), target, [4], whole.append)
    assert len(whole) > 4
    for stop in (1, 3):
        budgets = [N] * 3
        for one in whole[:stop]:
            budgets[one.layer] = one.budget
        rest = []
        search_budgets(LayeredLoss(model, data, budgets), target, [4], rest.append)
        assert rest == whole[stop:]


def test_steps_of_a_schedule():
    assert search_steps(8, 512, "greedy") == [8]
    assert search_steps(8, 512, "halving") == [128, 64, 32, 16, 8]
    assert search_steps(8, 24, "halving") == [8]
    assert search_steps(3, 100, "halving") == [24, 12, 6, 3]


def test_halving_goes_down_the_steps():
    model = make()
    data = batches(model)
    target = halfway(model, data)
    loss, rounds = LayeredLoss(model, data, [N] * 3), []
    search_budgets(loss, target, [6, 3], rounds.append)
    steps = [one.step for one in rounds]
    assert steps == sorted(steps, reverse=True)
    assert set(steps) == {6, 3}
    # No lowering by the last step is left within the target.
    for layer, budget in enumerate(loss.budgets):
        if budget > 2:
            assert loss.lowered(layer, max(2, budget - 3)).result.loss > target
