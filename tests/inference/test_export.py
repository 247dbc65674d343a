"""``evaluate.py export=DIR``: what the folder holds, that it loads elsewhere, and what is never overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hydra
import numpy as np
import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from selmodel import cli
from selmodel.config import register_resolvers
from selmodel.data.caching import umask
from selmodel.errors import UserError
from selmodel.evaluation.run import evaluate
from selmodel.inference.export import to_hugging_face
from selmodel.inference.generation import generate
from selmodel.training.loading import load_run
from selmodel.training.run import train
from tests.conftest import TINY
from tests.data.texts import HARD, prose

ROOT = Path(__file__).resolve().parents[2]
transformers_logging.disable_progress_bar()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus, cache_dir) -> Path:
    """The folder of a tiny selective run."""
    register_resolvers()
    root = tmp_path_factory.mktemp("export")
    with hydra.initialize_config_dir(str(cli.CONFIGS), version_base="1.3"):
        options = [*TINY, f"data.root={corpus}", f"cache_dir={cache_dir}", f"runs_root={root}", "sample=null"]
        train(hydra.compose("train", [*options, f"run_dir={root / 'run'}", "attention=selective"]))
    return root / "run"


@pytest.fixture
def command(trained, tmp_path, cache_dir):
    """Exports ``trained`` to a folder of the test and returns the folder."""

    def command(*overrides, folder="model", checkpoint=trained):
        options = [f"checkpoint={checkpoint}", f"export={tmp_path / folder}", f"cache_dir={cache_dir}"]
        with hydra.initialize_config_dir(str(cli.CONFIGS), version_base="1.3"):
            return evaluate(hydra.compose("evaluate", [*options, *overrides]))

    return command


def test_the_folder_gives_the_logits_of_the_run(command, trained):
    folder = command()
    run = load_run(trained)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not model.training
    tokens = torch.randint(3, run.tokenizer.vocab_size, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, run.model(tokens).logits)
    assert model.generation_config.eos_token_id == run.tokenizer.eos_id


def test_it_continues_a_text_as_generate_py_does_under_the_budgets_exported(command, trained):
    model = AutoModelForCausalLM.from_pretrained(command("budgets=[3,5]"))
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    assert model.config.budgets == [3, 5]
    run = load_run(trained)
    prompt = tokenizer("the water would", return_tensors="pt")
    ids = [run.tokenizer.bos_id, *run.tokenizer.encode("the water would").tolist()]
    assert prompt.input_ids[0].tolist() == ids
    expected = generate(run.model, torch.tensor(ids), 15, temperature=0, budgets=[3, 5], eos_id=run.tokenizer.eos_id)
    found = model.generate(**prompt, max_new_tokens=15, do_sample=False)[0].tolist()
    assert found[: len(expected)] == expected.tolist()
    assert tokenizer.decode(found, skip_special_tokens=True) == run.tokenizer.decode(found)


@pytest.mark.slow
def test_it_loads_in_a_fresh_process_that_imports_one_package(command, tmp_path):
    folder = command()
    script = (
        "import sys, selmodel.huggingface\n"
        "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer\n"
        "name = sys.argv[1]\n"
        "prompt = AutoTokenizer.from_pretrained(name)('the water', return_tensors='pt')\n"
        "model = AutoModelForCausalLM.from_pretrained(name)\n"
        "print(AutoConfig.from_pretrained(name).model_type, model.generate(**prompt, max_new_tokens=4).shape[1])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "selmodel"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_halves_the_weights_and_keeps_the_function(command, trained, dtype):
    whole, half = command(), command(f"export_dtype={dtype}", folder="half")
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (whole, half)]
    assert sizes[1] < 0.55 * sizes[0]
    model = AutoModelForCausalLM.from_pretrained(half)
    assert model.dtype == getattr(torch, dtype)
    tokens = torch.randint(3, 400, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = model(tokens).logits.float(), load_run(trained).model(tokens).logits
    # Weights are rounded to 8 (bfloat16) or 11 bits; a few roundings add up.
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_the_record_and_the_card_tell_figures_and_protocol_and_no_path(command, trained, corpus):
    folder = command("budgets=4")
    record, card = json.loads((folder / "selmodel.json").read_text()), (folder / "README.md").read_text()
    results = json.loads((trained / "results.json").read_text())
    assert record["validation"]["perplexity"] == results["validation"]["perplexity"]
    assert record["protocol"] == results["protocol"]
    assert (record["step"], record["tokens"]) == (12, 12 * 8 * 32)
    for shown in (f"{results['validation']['perplexity']:.2f}", results["protocol"]["tokenizer_hash"], "`selective`"):
        assert shown in card
    for path in folder.iterdir():
        assert str(corpus).encode() not in path.read_bytes(), path
        assert str(Path.home()).encode() + b"/" not in path.read_bytes(), path
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask(), path


def test_a_checkpoint_without_figures_of_its_own_shows_none(command, trained, tmp_path):
    """Those of another step would be wrong."""
    other = tmp_path / "run"
    other.mkdir()
    (other / "last.ckpt").write_bytes((trained / "last.ckpt").read_bytes())
    results = json.loads((trained / "results.json").read_text())
    (other / "results.json").write_text(json.dumps(results | {"step": 11}))
    folder = command(checkpoint=other)
    assert json.loads((folder / "selmodel.json").read_text())["validation"] == {}
    assert "None are recorded for this step" in (folder / "README.md").read_text()


def test_nothing_is_overwritten_unless_asked_for_and_only_an_export(command, tmp_path):
    folder = command()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(UserError, match=r"export=.*model: exists; expected a new folder, or overwrite=true"):
        command("export_dtype=bfloat16")
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    (folder / "mine.txt").write_text("old")
    command("export_dtype=bfloat16", "overwrite=true")
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert not (folder / "mine.txt").exists()

    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("words")
    with pytest.raises(UserError, match="is no export, so it is left alone"):
        command("overwrite=true", folder="thesis")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        command(folder="file")
    (tmp_path / "empty").mkdir()
    assert (command(folder="empty") / "config.json").is_file()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_export_that_fails_leaves_nothing_and_the_old_one_in_place(command, tmp_path, monkeypatch):
    folder = command()
    weights = (folder / "model.safetensors").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("selmodel.inference.export.model_card", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left"):
        command("overwrite=true")
    with pytest.raises(UserError, match="cannot be written"):
        command(folder="new")
    assert (folder / "model.safetensors").read_bytes() == weights
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("export_dtype=int8", "export_dtype=int8: must be one of float32, bfloat16, float16"),
        ("overwrite=maybe", "overwrite=maybe: expected true or false"),
        ("budgets=[3]", "budgets"),
        ("budgets=nowhere.json", "budgets=nowhere.json: cannot be read"),
        ("checkpoint=null", "checkpoint: not given"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(command, tmp_path, override, message):
    with pytest.raises(UserError, match=message):
        command(override)
    assert not list(tmp_path.iterdir())


# --- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """By kind: a training tokenizer, and what AutoTokenizer loads of its export."""
    from selmodel.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer
    from selmodel.data.tokenizer_training import train_sentencepiece
    from selmodel.huggingface import SelModelConfig

    root = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece(prose(300), root / "t.model", vocab_size=500)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(prose(300), trainer)
    kinds = {
        "sentencepiece": SentencePieceTokenizer(root / "t.model"),
        "huggingface": HuggingFaceTokenizer(content=backend.to_str().encode(), bos_token="<s>", eos_token="<s>"),
    }
    pairs = {}
    for name, tokenizer in kinds.items():
        to_hugging_face(tokenizer).save_pretrained(root / name)
        SelModelConfig(vocab_size=tokenizer.vocab_size).save_pretrained(root / name)
        pairs[name] = tokenizer, AutoTokenizer.from_pretrained(root / name)
    return pairs


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
@pytest.mark.parametrize("text", list(HARD))
def test_the_exported_tokenizer_gives_the_ids_of_training(pairs, kind, text):
    tokenizer, exported = pairs[kind]
    text = HARD[text]
    ids = tokenizer.encode(text).tolist()
    assert exported(text, add_special_tokens=False).input_ids == ids
    assert exported(text).input_ids == [tokenizer.bos_id, *ids]
    assert exported.decode(ids) == tokenizer.decode(ids) == text
    assert exported.decode([tokenizer.bos_id, *ids, tokenizer.eos_id], skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_the_exported_tokenizer_pads_on_the_left_and_knows_its_special_tokens(pairs, kind):
    tokenizer, exported = pairs[kind]
    assert (exported.bos_token_id, exported.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert len(exported) == tokenizer.vocab_size
    batch = exported(["ba", "ba ba ba ba"], padding=True, return_tensors="np")
    assert batch.attention_mask[0].tolist() == sorted(batch.attention_mask[0].tolist())
    assert np.array_equal(batch.input_ids[0][batch.attention_mask[0] == 1], exported("ba").input_ids)
    assert exported.decode(exported("ba").input_ids) == f"{exported.bos_token}ba"
    assert exported.convert_tokens_to_ids(exported.tokenize("ba ce")) == tokenizer.encode("ba ce").tolist()


def test_the_sentencepiece_tokenizer_takes_further_tokens(pairs, tmp_path):
    _, exported = pairs["sentencepiece"]
    import copy

    exported = copy.deepcopy(exported)
    exported.add_tokens(["<tool>"])
    ids = exported("ba<tool>ce", split_special_tokens=False, add_special_tokens=False).input_ids
    assert exported.vocab_size in ids
    assert exported.decode(ids) == "ba<tool>ce"


def test_a_tokenizer_of_another_kind_is_not_exported():
    class Own:
        pass

    with pytest.raises(UserError, match="kind Own has no Hugging Face form"):
        to_hugging_face(Own())
