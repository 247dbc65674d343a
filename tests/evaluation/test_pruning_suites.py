"""evaluate.py under budgets, on a tiny trained run: pruning, the table of rules, and the search as a command."""

from __future__ import annotations

import json
import math

import hydra
import pytest
import torch

from selmodel.attention.cache import KVCache
from selmodel.budgets import read_budgets
from selmodel.cli import CONFIGS
from selmodel.errors import UserError
from selmodel.evaluation import budget_suite
from selmodel.evaluation.run import evaluate
from selmodel.training.interrupt import Interrupted
from selmodel.training.loading import load_run
from selmodel.training.losses import token_losses
from selmodel.training.run import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def trained(runs, tiny):
    """The folder of a run of ``attention``, trained once for all tests of the file."""

    def trained(attention, *overrides):
        folder = runs / "-".join((attention, *overrides)).replace("=", "-")
        if not folder.exists():
            train(tiny(folder, f"attention={attention}", "sample=null", "trainer.max_steps=10", *overrides))
        return folder

    return trained


@pytest.fixture
def command(tmp_path, cache_dir):
    """Runs evaluate.py in this process and returns what its suite returns; figures go to ``tmp_path``."""

    def command(checkpoint, *overrides, output="out.json"):
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            cfg = hydra.compose(
                "evaluate",
                [
                    f"checkpoint={checkpoint}",
                    f"cache_dir={cache_dir}",
                    "trainer=cpu",
                    f"output={tmp_path / output}" if output else "output=null",
                    *overrides,
                ],
            )
        return evaluate(cfg)

    return command


def read(path):
    return json.loads(path.read_text())


def test_pruning_is_decoding_step_by_step(trained, command, tmp_path, cache_dir):
    folder = trained("selective")
    result = command(folder, "suite=pruning", "budgets=[3,6]")
    run = load_run(folder)
    data = run.data(cache_dir=cache_dir)
    data.setup("validate")
    total = count = 0
    for batch in data.val_dataloader():
        tokens = batch["tokens"]
        cache = KVCache(run.model, len(tokens), [3, 6])
        with torch.no_grad():
            logits = torch.cat([run.model(one, cache=cache).logits for one in tokens[:, :-1].split(1, 1)], 1)
        total += token_losses(logits, tokens[:, 1:]).double().sum().item()
        count += tokens[:, 1:].numel()
    assert result.loss == pytest.approx(total / count, abs=1e-5)  # float32, sums in other orders
    content = read(tmp_path / "out.json")
    assert content["validation"]["loss"] == result.loss
    assert content["memory_factor"] == 32 * 2 / 9
    assert content["budgets"] == [3, 6]
    assert content["protocol"]["validation_sequences"] == 10
    unpruned = read(folder / "results.json")["validation"]["loss"]
    assert content["unpruned"]["loss"] == pytest.approx(unpruned, abs=1e-5)
    assert abs(result.loss - unpruned) > 1e-5  # something was pruned


def test_files_of_other_options_have_other_names(trained, command, runs):
    folder = trained("selective")
    for budgets in ("4", "[4,5]"):
        command(folder, "suite=pruning", f"budgets={budgets}", output=None)
    command(folder, "suite=pruning", "budgets=4", "rule=oldest", output=None)
    assert len(list(folder.glob("pruning-last+*.json"))) == 3


def test_table_of_rules(trained, command, tmp_path):
    for attention, rules in (
        ("selective", {"selective", "oldest", "h2o", "tova"}),
        ("standard", {"oldest", "h2o", "tova"}),
    ):
        folder = trained(attention)
        losses = command(folder, "suite=pruning_rules", "n_keys=[4,99]")
        assert set(losses) == rules
        unpruned = read(folder / "results.json")["validation"]["loss"]
        for by_keys in losses.values():
            assert set(by_keys) == {4, 32}  # 99 is the context
            assert by_keys[32] == pytest.approx(unpruned, abs=1e-5)
        assert len({round(by_keys[4], 7) for by_keys in losses.values()}) == len(rules)
        rows = read(tmp_path / "out.json")["table"]
        assert {(row["rule"], row["keys"]): row["loss"] for row in rows} == {
            (rule, key): loss for rule, by_keys in losses.items() for key, loss in by_keys.items()
        }


SEARCH = ("suite=budget_search", "search.sequences=4", "search.increase=0.001", "search.step=6")


def test_search_writes_budgets_that_others_accept(trained, command, tmp_path):
    folder = trained("selective")
    content = command(folder, *SEARCH)
    budgets, model = content["budgets"], load_run(folder).model
    assert content["memory_factor"] == 64 / sum(budgets)
    assert content["searched_on"]["sequences"] == 4
    assert content["unseen"]["sequences"] == 6
    assert content["searched_on"]["loss"] <= content["searched_on"]["target_loss"]
    assert content["searched_on"]["target_perplexity"] == pytest.approx(
        content["searched_on"]["unpruned_perplexity"] * 1.001
    )
    assert content["perplexity"] == content["unseen"]["perplexity"]
    assert read_budgets(tmp_path / "out.json", model).budgets == tuple(budgets)
    # Both parts together are the whole validation set.
    whole = command(folder, "suite=pruning", f"budgets={tmp_path / 'out.json'}", output="pruning.json")
    together = (4 * content["searched_on"]["loss"] + 6 * content["unseen"]["loss"]) / 10
    assert whole.loss == pytest.approx(together, abs=1e-5)
    again = command(folder, *SEARCH)  # finished: read, not searched
    assert again == content


def test_a_standard_model_as_the_target(trained, command):
    content = command(
        trained("selective"), *SEARCH[:2], "search.step=16", f"search.target={trained('standard')}/best.ckpt"
    )
    standard = read(trained("standard") / "results.json")["validation"]["loss"]
    together = (4 * content["searched_on"]["target_loss"] + 6 * content["unseen"]["target_loss"]) / 10
    assert together == pytest.approx(standard, abs=1e-5)


def test_stopped_and_started_again_it_is_the_uninterrupted_search(trained, command, tmp_path, monkeypatch):
    folder = trained("selective")
    whole = command(folder, *SEARCH, output="whole.json")
    assert len(whole["rounds"]) > 3

    write = budget_suite.write_atomically

    def stop_after(n):
        def write_and_stop(path, content):
            write(path, content)
            if path.name.endswith(".partial.json") and len(json.loads(content)["rounds"]) == n:
                raise KeyboardInterrupt

        monkeypatch.setattr(budget_suite, "write_atomically", write_and_stop)

    for n in (2, 3):
        stop_after(n)
        with pytest.raises(Interrupted, match=f"stopped by SIGINT after round {n}"):
            command(folder, *SEARCH, output="parts.json")
    monkeypatch.undo()
    parts = command(folder, *SEARCH, output="parts.json")
    assert parts == whole
    assert not list(tmp_path.glob("*.partial.json"))


def test_a_file_of_another_search_is_not_overwritten(trained, command, tmp_path):
    folder = trained("selective")
    command(folder, *SEARCH)
    before = (tmp_path / "out.json").read_bytes()
    with pytest.raises(UserError, match=r"search\.step: 6 in the file, 7 now"):
        command(folder, *SEARCH[:-1], "search.step=7")
    (tmp_path / "out.json").write_text("notes")
    with pytest.raises(UserError, match="is no result of this search"):
        command(folder, *SEARCH)
    assert (tmp_path / "out.json").read_text() == "notes"
    assert before != b"notes"


MISTAKES = {
    "no budgets": (("suite=pruning",), "budgets: not given"),
    "wrong length": (("suite=pruning", "budgets=[4,4,4]"), "expected 2, or one integer"),
    "below two": (("suite=pruning", "budgets=1"), "budgets=1: expected an integer of at least 2"),
    "not whole": (("suite=pruning", "budgets=[4,4.5]"), r"budgets\[1\]=4.5"),
    "no rule of that name": (("suite=pruning", "budgets=4", "rule=h20"), "rule=h20: no such pruning rule"),
    "keys": (("suite=pruning_rules", "n_keys=[8,1]"), r"n_keys=\[8, 1\]: expected numbers of keys"),
    "no target": (("suite=budget_search",), "search.target: not given"),
    "two targets": ((*SEARCH, "search.target=9"), "give one of them"),
    "below one": (("suite=budget_search", "search.target=0.5"), "a perplexity is 1 or more"),
    "negative": (("suite=budget_search", "search.increase=-1"), "search.increase=-1: expected 0 or more"),
    "step": ((*SEARCH, "search.step=0"), "search.step=0"),
    "schedule": ((*SEARCH, "search.schedule=fast"), "expected one of greedy, halving"),
    "nothing left": ((*SEARCH, "search.sequences=10"), "search.sequences=10 of data.validation_sequences=10"),
    "out of reach": ((*SEARCH[:2], "search.target=2"), "the target, perplexity 2.00, is below"),
    "target is no file": ((*SEARCH[:2], "search.target=nowhere.ckpt"), "nowhere.ckpt: no such file"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda name: name.replace(" ", "_"))
def test_mistakes(trained, command, tmp_path, mistake):
    overrides, words = MISTAKES[mistake]
    with pytest.raises(UserError, match=words):
        command(trained("selective"), *overrides)
    assert not list(tmp_path.iterdir())


def test_standard_attention_needs_a_rule(trained, command):
    with pytest.raises(UserError, match="standard attention and no rule"):
        command(trained("standard"), "suite=pruning", "budgets=4")
    assert math.isfinite(command(trained("standard"), "suite=pruning", "budgets=4", "rule=oldest").loss)


def test_a_target_of_another_context_is_refused(trained, command):
    other = trained("standard", "model.context_length=16")
    with pytest.raises(UserError, match=r"has model\.context_length=16, and 32 in"):
        command(trained("selective"), *SEARCH[:2], f"search.target={other}")


def test_a_run_with_a_document_mask_is_refused(trained, command):
    folder = trained("selective", "data.document_mask=true")
    with pytest.raises(UserError, match=r"data\.document_mask=true"):
        command(folder, "suite=pruning", "budgets=4")
