"""Perplexity of Hugging Face models under this project's protocol: the same text, its bytes, and what is refused."""

from __future__ import annotations

import gzip
import json
import math

import hydra
import numpy as np
import pytest
import tokenizers
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from selmodel.cli import CONFIGS
from selmodel.config import register_resolvers
from selmodel.errors import UserError
from selmodel.evaluation.run import evaluate
from selmodel.evaluation.subject import load_subject
from selmodel.training.run import train
from tests.conftest import TINY, WORDS

transformers_logging.disable_progress_bar()


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus, cache_dir):
    """The folder of a tiny selective run."""
    register_resolvers()
    root = tmp_path_factory.mktemp("foreign")
    options = [*TINY, f"data.root={corpus}", f"cache_dir={cache_dir}", f"runs_root={root}", "sample=null"]
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        train(hydra.compose("train", [*options, f"run_dir={root / 'run'}", "attention=selective"]))
    return root / "run"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A small GPT-2 with random weights and its kind of tokenizer: one token for BOS and EOS, spaces in the words."""
    folder = tmp_path_factory.mktemp("gpt2")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([" ".join(WORDS)] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=48, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    model.transformer.wte.weight.data.mul_(20)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def command(tmp_path, cache_dir):
    def compose(*overrides):
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose(
                "evaluate",
                [f"cache_dir={cache_dir}", "trainer=cpu", f"output={tmp_path / 'out.json'}", *overrides],
            )

    return compose


def test_an_exported_run_has_the_figures_of_the_run(command, run, tmp_path):
    """The same weights, tokenizer and text: token for token what the run validated, and byte for byte."""
    evaluate(command(f"checkpoint={run}", f"export={tmp_path / 'model'}"))
    result = evaluate(command(f"checkpoint=hf:{tmp_path / 'model'}", f"like={run}"))
    expected = json.loads((run / "results.json").read_text())
    validation = expected["validation"]
    assert (result.tokens, result.bytes, result.sequences) == tuple(
        validation[name] for name in ("tokens", "bytes", "sequences")
    )
    # float32, in batches of another size
    assert result.loss == pytest.approx(validation["loss"], rel=1e-5)
    assert result.bits_per_byte == pytest.approx(validation["bits_per_byte"], rel=1e-5)
    found = json.loads((tmp_path / "out.json").read_text())
    del expected["protocol"]["precision"]
    assert found["protocol"].items() >= expected["protocol"].items()


def test_bits_per_byte_of_another_tokenizer_are_those_of_the_same_bytes(command, run, gpt2, corpus):
    """An oracle by hand: the documents of the split, cut by GPT-2's tokenizer, until the run's bytes are used."""
    result = evaluate(command(f"checkpoint=hf:{gpt2}", f"like={run}"))
    n_bytes = json.loads((run / "results.json").read_text())["validation"]["bytes"]
    assert n_bytes - 20 < result.bytes <= n_bytes  # less than a token short

    tokenizer = PreTrainedTokenizerFast.from_pretrained(gpt2)
    model = GPT2LMHeadModel.from_pretrained(gpt2).eval()
    ids, sizes = [], []
    for row in _texts(corpus):
        encoded = tokenizer(row, add_special_tokens=False).input_ids
        ids += [*encoded, tokenizer.eos_token_id]
        sizes += [*(len(tokenizer.decode([i]).encode()) for i in encoded), 0]
    n = result.tokens
    assert sum(sizes[:n]) == result.bytes
    assert sum(sizes[: n + 1]) > n_bytes
    total = 0.0
    for start in range(0, n, 32):  # the run's context
        chunk = ids[start : start + 32]
        inputs = torch.tensor([[tokenizer.bos_token_id, *chunk[:-1]]])
        with torch.no_grad():
            losses = model(inputs).logits[0].log_softmax(-1)
        picked = losses.gather(1, torch.tensor(chunk)[:, None])[: n - start, 0]
        total -= picked.double().sum().item()
    assert result.loss == pytest.approx(total / n, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(total / math.log(2) / result.bytes, rel=1e-5)


def _texts(corpus):
    for path in sorted((corpus / "en").glob("c4-validation.*")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from (json.loads(line)["text"] for line in file)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_without_a_run_the_first_sequences_of_a_corpus_are_taken_whatever_the_batch(command, gpt2, corpus, batch_size):
    options = [f"checkpoint=hf:{gpt2}", f"data.root={corpus}", "data.validation_sequences=7"]
    result = evaluate(command(*options, f"data.validation_batch_size={batch_size}"))
    assert (result.sequences, result.tokens) == (7, 7 * 48)  # the model's own context
    shorter = evaluate(command(*options, "context_length=16"))
    assert (shorter.sequences, shorter.tokens) == (7, 7 * 16)
    assert np.isfinite(result.loss_by_position).all()


def test_results_get_a_name_of_their_own_where_none_is_given(command, gpt2, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = (f"checkpoint=hf:{gpt2}", f"data.root={corpus}", "data.validation_sequences=2", "output=null")
    evaluate(command(*options))
    (path,) = tmp_path.glob("evaluation-*.json")
    results = json.loads(path.read_text())
    assert results["checkpoint"] == f"hf:{gpt2.name}"
    assert (results["model_type"], results["parameters"]) == ("gpt2", sum(_sizes(gpt2)))
    assert str(gpt2.parent) not in path.read_text()


def _sizes(folder):
    return (parameter.numel() for parameter in GPT2LMHeadModel.from_pretrained(folder).parameters())


def test_the_only_special_token_begins_and_ends_texts_and_no_id_is_made_up(command, gpt2):
    subject = load_subject(command(f"checkpoint=hf:{gpt2}"))
    assert subject.tokenizer.bos_id == subject.tokenizer.eos_id == 0
    assert subject.context_length == 48
    assert subject.tokenizer.encode("<|endoftext|>").tolist() != [0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint=hf:"], "checkpoint=hf:: names no model"),
        (["checkpoint=hf:FOLDER", "suite=pruning", "budgets=8"], "suite=pruning with checkpoint=hf:.*expected one of"),
        (["checkpoint=hf:FOLDER", "budgets=8"], "budgets=8 with checkpoint=hf:"),
        (["checkpoint=hf:FOLDER", "context_length=1"], "context_length=1: expected"),
        (["checkpoint=hf:FOLDER", "context_length=49", "data.root=CORPUS"], "takes 48 tokens at most"),
        (["checkpoint=hf:FOLDER", "data.validation_sequences=0"], r"data\.validation_sequences=0: expected"),
        (["checkpoint=hf:FOLDER", "data.root=/nowhere"], r"data\.root=/nowhere"),
        (["checkpoint=hf:FOLDER", "precision=int8"], "precision=int8: expected one of 32-true"),
        (["checkpoint=hf:CORPUS"], "checkpoint=hf:.*cannot be loaded"),
        (["checkpoint=RUN", "like=RUN"], "like=.*leave it out"),
        (["checkpoint=hf:FOLDER", "like=/nowhere"], "checkpoint=/nowhere"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(command, run, gpt2, corpus, overrides, message):
    places = {"FOLDER": str(gpt2), "CORPUS": str(corpus), "RUN": str(run)}
    for name, place in places.items():
        overrides = [option.replace(name, place) for option in overrides]
    with pytest.raises(UserError, match=message):
        evaluate(command(*overrides))


def test_a_model_that_brings_code_is_not_run(command, gpt2, tmp_path):
    """A stranger's folder may ask for code of its own; the answer is no, and nothing of it is executed."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in gpt2.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="cannot be loaded"):
        evaluate(command(f"checkpoint=hf:{folder}"))
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_are_not_read(command, gpt2, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in gpt2.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    torch.save(GPT2LMHeadModel.from_pretrained(gpt2).state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be loaded"):
        evaluate(command(f"checkpoint=hf:{folder}"))
