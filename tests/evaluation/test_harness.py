"""lm-eval on a run: log-likelihoods by hand, one <BOS>, any batch size, HellaSwag from a folder, what is refused."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import hydra
import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

import datasets
from omegaconf import OmegaConf

import selmodel.evaluation
from selmodel.cli import CONFIGS
from selmodel.config import register_resolvers
from selmodel.errors import UserError
from selmodel.evaluation.harness import HarnessModel, import_evaluate
from selmodel.evaluation.run import evaluate
from selmodel.evaluation.subject import Subject, load_subject
from selmodel.inference.generation import generate
from selmodel.training.loading import load_run
from selmodel.training.run import train
from tests.conftest import TINY

ENDINGS = ["which she could", "all were there about many", "go", "people use their time if then"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus, cache_dir):
    """The folder of a tiny selective run."""
    register_resolvers()
    root = tmp_path_factory.mktemp("harness")
    options = [*TINY, f"data.root={corpus}", f"cache_dir={cache_dir}", f"runs_root={root}", "sample=null"]
    options += ["model.context_length=64", "data.validation_sequences=5"]
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        train(hydra.compose("train", [*options, f"run_dir={root / 'run'}", "attention=selective"]))
    return root / "run"


@pytest.fixture
def command(run, tmp_path, cache_dir):
    """Composes the options of evaluate.py."""

    def compose(*overrides):
        options = [f"checkpoint={run}", f"cache_dir={cache_dir}", "trainer=cpu", f"output={tmp_path / 'out.json'}"]
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose("evaluate", [*options, *overrides])

    return compose


@pytest.fixture
def subject(command) -> Subject:
    return load_subject(command())


@pytest.fixture(scope="module")
def hellaswag(tmp_path_factory):
    """Made-up questions in HellaSwag's columns, saved by ``datasets``."""
    rows = [
        {
            "ind": i, "activity_label": f"Time {i}", "ctx_a": "The water would make people.", "ctx_b": "then they",
            "ctx": "", "endings": ENDINGS[i % 4 :] + ENDINGS[: i % 4], "source_id": "", "split": "val",
            "split_type": "indomain", "label": str(i % 3),
        }
        for i in range(12)
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("hellaswag")
    datasets.Dataset.from_list(rows).save_to_disk(folder / "none" / "validation")
    return folder


def log_likelihood(run, context: str, continuation: str) -> float:
    """Summed by hand from one forward pass of the run's model; the continuation begins with its own token."""
    loaded = load_run(run)
    whole = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode(context + continuation).tolist()]
    known = 1 + len(loaded.tokenizer.encode(context))
    with torch.no_grad():
        table = loaded.model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(table[i - 1, whole[i]].item() for i in range(known, len(whole)))


def ask(model, *pairs):
    return model.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_log_likelihoods_are_those_of_the_model_whatever_the_batch(run, subject, batch_size):
    pairs = [("the water", f" {ending}") for ending in ENDINGS] + [("a", " the"), ("people use their time", " of it")]
    found = ask(HarnessModel(subject, batch_size), *pairs)
    for pair, (value, _) in zip(pairs, found, strict=True):
        assert value == pytest.approx(log_likelihood(run, *pair), rel=1e-5)  # float32, batches of other shapes


def test_the_likeliest_continuation_is_told_from_others(run, subject):
    loaded = load_run(run)
    ids = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode("the water").tolist()]
    best = loaded.model(torch.tensor([ids])).logits[0, -1].argmax().item()
    model = HarnessModel(subject, 4)
    worst = 5 if best != 5 else 6
    found = model._loglikelihood_tokens([(None, ids, [best]), (None, ids, [worst])])
    assert [greedy for _, greedy in found] == [True, False]


def test_without_a_context_the_text_begins_with_one_bos(run, subject):
    ((value, _),) = ask(HarnessModel(subject, 2), ("", "the water"))
    assert value == pytest.approx(log_likelihood(run, "", "the water"), rel=1e-5)
    assert HarnessModel(subject, 2).tok_encode("a") == [subject.tokenizer.bos_id, *subject.tokenizer.encode("a")]


def test_a_text_beyond_the_context_loses_its_beginning_but_not_its_bos(subject):
    model = HarnessModel(subject, 2)
    ids = list(range(10, 110))
    tokens, scored = model._fit([1, *ids[:90]], ids[90:])
    assert tokens == [1, *ids[36:]]  # 64 are read: <BOS> and 63; the last is only predicted
    assert scored == 10
    assert model.cut == 1
    tokens, scored = model._fit([1], ids)  # what is scored does not fit either
    assert (tokens, scored) == ([1, *ids[36:]], 64)
    (value, _), (shorter, _) = model._loglikelihood_tokens([(None, [1, *ids[:90]], ids[90:]), (None, [1], ids[36:])])
    assert 0 > value > shorter


def test_whole_texts_are_summed_over_windows_of_the_context(run, subject):
    loaded = load_run(run)
    text = "the water would make people use their time if then " * 12
    ids = loaded.tokenizer.encode(text).tolist()
    assert len(ids) > 2 * 64
    (found,) = HarnessModel(subject, 2).loglikelihood_rolling([SimpleNamespace(args=(text,))])
    expected, windows = 0.0, [ids[start : start + 64] for start in range(0, len(ids), 64)]
    for window in windows:
        inputs = torch.tensor([[loaded.tokenizer.bos_id, *window[:-1]]])
        with torch.no_grad():
            table = loaded.model(inputs).logits[0].log_softmax(-1)
        expected += table.gather(1, torch.tensor(window)[:, None]).sum().item()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("budgets", ["null", "4"])
def test_texts_are_the_likeliest_and_end_before_a_stop_string(run, command, budgets):
    subject, loaded = load_subject(command(f"budgets={budgets}")), load_run(run)
    prompt = torch.tensor([loaded.tokenizer.bos_id, *loaded.tokenizer.encode("the water").tolist()])
    pruning = {} if budgets == "null" else {"budgets": int(budgets)}
    expected = generate(loaded.model, prompt, 20, temperature=0, eos_id=loaded.tokenizer.eos_id, **pruning)
    whole = loaded.tokenizer.decode(expected[len(prompt) :].tolist())
    model = HarnessModel(subject, 2)
    (found,) = model.generate_until([SimpleNamespace(args=("the water", {"max_gen_toks": 20, "until": []}))])
    assert found == whole
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    (found,) = model.generate_until([SimpleNamespace(args=("the water", {"max_gen_toks": 20, "until": [stop, "@"]}))])
    assert found == whole[: whole.index(stop)]
    with pytest.raises(UserError, match="sampled text"):
        model.generate_until([SimpleNamespace(args=("a", {"do_sample": True, "temperature": 0.7}))])


def test_hellaswag_is_scored_by_hand_alike(run, command, hellaswag, tmp_path):
    """12 made-up questions: the ending with the highest log-probability, and per character of it."""
    results = evaluate(command("suite=hellaswag", f"hellaswag.path={hellaswag}"))
    right = {"acc": 0, "acc_norm": 0}
    for i in range(12):
        endings = ENDINGS[i % 4 :] + ENDINGS[: i % 4]
        question = f"Time {i}: The water would make people. Then they"
        sums = [log_likelihood(run, question, f" {ending}") for ending in endings]
        lengths = [len(ending) for ending in endings]
        right["acc"] += sums.index(max(sums)) == i % 3
        scaled = [total / length for total, length in zip(sums, lengths, strict=True)]
        right["acc_norm"] += scaled.index(max(scaled)) == i % 3
    found = {row["metric"]: row for row in results["results"]}
    assert set(found) == {"acc", "acc_norm"}
    for metric, count in right.items():
        share = count / 12
        assert found[metric]["value"] == pytest.approx(share)
        assert found[metric]["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 11))
        assert found[metric]["n"] == 12
    assert json.loads((tmp_path / "out.json").read_text())["protocol"]["texts_cut"] == 0


def test_batches_and_an_exported_model_change_nothing(command, hellaswag, tmp_path):
    options = ("suite=hellaswag", f"hellaswag.path={hellaswag}")
    evaluate(command(f"export={tmp_path / 'model'}"))
    rows = [
        evaluate(command(*options, *others))["results"]
        for others in ((), ("batch_size=1",), ("batch_size=5",), (f"checkpoint=hf:{tmp_path / 'model'}",))
    ]
    assert rows[0] == rows[1] == rows[2] == rows[3]


def test_budgets_and_limit_are_part_of_the_question_and_of_the_file_name(command, hellaswag, run):
    options = ("suite=hellaswag", f"hellaswag.path={hellaswag}", "output=null", "limit=8")
    whole, pruned = evaluate(command(*options)), evaluate(command(*options, "budgets=3"))
    assert (whole["budgets"], pruned["budgets"]) == (None, [3, 3])
    names = {path.name for path in run.glob("hellaswag-*.json")}
    assert names == {"hellaswag-last+limit-8.json", "hellaswag-last+budgets-3+limit-8.json"}
    assert pruned["results"][0]["n"] == 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["suite=hellaswag", "hellaswag.path=/nowhere"], r"hellaswag\.path=/nowhere: holds no data set; expected"),
        (["suite=hellaswag", "hellaswag.path=OTHER"], r"hellaswag\.path=.*: lacks activity_label, ctx_a"),
        (["suite=hellaswag", "hellaswag.path=SPLITS"], r"has no split validation, only train"),
        (["suite=hellaswag", "hellaswag.path=DAMAGED"], r"hellaswag\.path=.*: cannot be read"),
        (["suite=lm_eval"], r"tasks: not given; expected tasks=\[NAME"),
        (
            ["suite=lm_eval", "tasks=[hellaswagg]"],
            "tasks=hellaswagg: lm-eval knows no such task; did you mean hellaswag",
        ),
        (["suite=hellaswag", "batch_size=0", "limit=-1"], r"batch_size=0: expected.*\n.*limit=-1: expected"),
        (["suite=hellaswag", "num_fewshot=x"], "num_fewshot=x: expected a whole number"),
    ],
)
def test_what_cannot_be_run_is_refused(command, hellaswag, tmp_path, overrides, message):
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "other")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path / "splits")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "state.json").write_text("{")
    for name in ("other", "splits", "damaged"):
        overrides = [option.replace(name.upper(), str(tmp_path / name)) for option in overrides]
    with pytest.raises(UserError, match=message):
        evaluate(command(*overrides))


def test_a_hub_that_is_not_there_is_an_error_with_a_way_out(command, monkeypatch):
    import lm_eval

    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'Rowan/hellaswag' on the Hub")

    monkeypatch.setattr(lm_eval, "simple_evaluate", unreachable)
    with pytest.raises(UserError, match=r"the data of hellaswag cannot be had: Couldn't reach.*hellaswag\.path=DIR"):
        evaluate(command("suite=hellaswag"))


def test_a_missing_lm_eval_is_answered_with_the_command_that_installs_it(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "selmodel.evaluation.harness")
    monkeypatch.delattr(selmodel.evaluation, "harness")
    with pytest.raises(UserError, match=r"need lm-eval .*pip install -e '.\[eval\]'"):
        evaluate(command("suite=hellaswag"))


def test_metrics_of_the_package_evaluate_are_found_beside_the_script_of_that_name(monkeypatch):
    """As in ``python evaluate.py``, which puts the script's folder first on the path."""
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)
    monkeypatch.syspath_prepend(str(CONFIGS.parent))
    assert callable(import_evaluate().load)
    assert sys.path[0] == str(CONFIGS.parent)


def test_options_that_no_suite_reads_are_still_refused(command):
    cfg = command()
    OmegaConf.set_struct(cfg, False)
    cfg.taks = ["piqa"]
    with pytest.raises(UserError, match="taks: no such option; did you mean tasks"):
        evaluate(cfg)
