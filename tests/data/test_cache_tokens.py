"""The command that writes token caches."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from selmodel.data.sources import LocalSource
from selmodel.data.token_cache import TokenCache
from selmodel.data.tokenizer import SentencePieceTokenizer

SCRIPT = Path(__file__).resolve().parent.parent.parent / "data" / "cache_tokens.py"


@pytest.fixture(scope="module")
def command():
    spec = importlib.util.spec_from_file_location("cache_tokens", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def options(corpus, cache_dir):
    return ["data=local", f"data.root={corpus}", f"cache_dir={cache_dir}", "tokenizer.vocab_size=400"]


def test_the_cache_holds_the_tokens_of_the_corpus(command, options, corpus, tmp_path, capsys):
    assert command([str(tmp_path / "cache"), *options]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("token cache: 1 of 4 shards, ")
    assert printed[-1].endswith(f"data=tokens data.root={tmp_path / 'cache'} tokenizer.vocab_size=400")
    tokenizer = SentencePieceTokenizer(tmp_path / "cache" / "tokenizer.model")
    documents = TokenCache(str(tmp_path / "cache")).documents(tokenizer)
    source = LocalSource(str(corpus))
    for number, shard in enumerate(source.shards("train")):
        tokens = np.concatenate([block.tokens for block in documents.blocks("train", number)])
        texts = [tokenizer.decode(ids) for ids in np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_id) + 1)[:-1]]
        assert texts == [text for _, text in source.rows(shard)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data=locl"], "error: data=locl: no such choice"),
        (["data=local", "data.root=/nowhere/to/be/found"], "error: data.root=/nowhere/to/be/found: no such folder"),
        (["--workers", "-1"], "error: --workers -1: expected 0 or more processes"),
    ],
)
def test_faults_are_messages(command, arguments, message, tmp_path, capsys):
    assert command([str(tmp_path / "cache"), *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_runs_as_a_script_from_any_folder(options, tmp_path):
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "cache", "--workers", "1", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    TokenCache(str(tmp_path / "cache")).prepare()
