"""The benchmark of decoding: that it times what generation does, its bytes, its table, its answers to bad options."""

from __future__ import annotations

import json

import decode
import pytest
import torch
from measuring import Skipped

from selmodel.attention import SelectiveAttention, StandardAttention
from selmodel.training.run import train

SIZES = {"vocab_size": 50, "n_layers": 2, "n_heads": 2, "d_model": 32, "head_dim": 16, "context_length": 24}


@pytest.fixture
def setup() -> decode.Setup:
    tokens = torch.randint(50, (3, 24), generator=torch.Generator().manual_seed(0))
    return decode.Setup(SIZES, tokens, 5, "cpu", torch.float32)


@pytest.mark.parametrize("name", ["standard", "selective", "selective, budgets", "standard, h2o"])
def test_a_turn_reads_and_decodes_the_whole_context(setup, name):
    contender = decode.contenders([4, 9], ["h2o"])[name]
    run = decode.Decoding(setup, contender)
    logits = run()
    assert run.cache.length == 24
    whole = run.model.pruned(setup.tokens, contender.budgets, rule=contender.rule).logits[:, -1]
    torch.testing.assert_close(logits, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run(), logits, rtol=0, atol=0)  # every turn begins anew
    assert len(contender.seconds) == 2
    assert all(part > 0 for turn in contender.seconds for part in turn)


def test_models_have_the_same_weights(setup):
    models = [setup.model(one) for one in decode.contenders([4, 4], []).values()]
    assert [type(m.blocks[0].attention) for m in models] == [StandardAttention, SelectiveAttention, SelectiveAttention]
    for model in models[1:]:
        assert all(map(torch.equal, model.parameters(), models[0].parameters()))


@pytest.mark.parametrize("name", ["standard", "selective", "selective, budgets", "standard, h2o", "standard, oldest"])
def test_caches_hold_the_bytes_expected(setup, name):
    contender = decode.contenders([4, 30], ["h2o", "oldest"])[name]
    cache = setup.cache(setup.model(contender), contender)
    # The views and constants of a layer are a few bytes a row.
    assert cache.nbytes == decode.expected_bytes(setup, contender)


def test_bytes_worked_by_hand(setup):
    # A slot holds key and value of 2 heads of 16 float32 numbers: 256 bytes; F and age: 4 each. 3 rows, 2 layers.
    pruned = decode.contenders([4, 9], [])["selective, budgets"]
    assert decode.expected_bytes(setup, pruned) == 3 * ((4 + 1 + 9 + 1) * (256 + 8) + 2 * 12)


def test_measured_figures(setup):
    chosen = decode.contenders([4, 4], [])
    figures = decode.measure(setup, chosen, rounds=2, patience=60, memory=False)
    assert list(figures) == ["standard", "selective", "selective, budgets"]
    pruned = figures["selective, budgets"]
    assert pruned["promised_factor"] == 6.0
    assert pruned["prefill_seconds"] > 0
    assert len(chosen["standard"].seconds) == 3  # the warm-up is not in the medians


def test_a_table_worked_by_hand(setup):
    def figures(prefill, decoding, size):
        return {
            "prefill_seconds": prefill, "decode_seconds": decoding, "cache_bytes": size, "expected_bytes": size,
            "resident_bytes": Skipped("not here"), "promised_factor": 4.0,
        }  # fmt: skip

    lines = decode.table(
        {
            "standard": figures(0.5, 2.0, 2**20),
            "selective": figures(0.25, 1.0, 2**18),
            "other": {"skipped": Skipped("out of memory")},
        },
        setup,
    )
    assert [line.split() for line in lines[4:]] == [
        ["standard", "1.00", "500.0", "114", "1.00", "8", "1.000", "-", "1.0", "1.0", "4.0"],
        ["selective", "0.50", "250.0", "228", "2.00", "15", "0.250", "-", "4.0", "4.0", "4.0"],
        ["other", "out", "of", "memory"],
    ]
    assert "3 at a time" in lines[1]


def test_budgets_reach_the_factor():
    assert decode.budgets_for(16, 512, 3) == [32, 32, 32]
    assert decode.budgets_for(25, 1024, 1) == [40]
    assert decode.budgets_for(1000, 512, 1) == [2]


def test_table_and_file(tmp_path, capsys):
    file = tmp_path / "figures.json"
    tiny = "--contexts 16 24 --factors 4 6 --steps 3 --layers 1 --heads 1 --vocab-size 40 --rounds 1 --no-memory"
    decode.main([*f"{tiny} --device cpu --rules tova --json".split(), str(file)])
    printed = capsys.readouterr().out
    assert "1 layers, 1 heads, d_model 64, float32" in printed
    assert printed.count("standard, tova") == 2
    contexts = json.loads(file.read_text())["contexts"]
    assert list(contexts) == ["16", "24"]
    assert contexts["24"]["selective, budgets"]["budgets"] == [4]


@pytest.mark.slow
def test_resident_size_is_that_of_the_cache():
    tokens = torch.zeros(4, 4096, dtype=torch.int64)
    setup = decode.Setup(
        SIZES | {"context_length": 4096, "n_heads": 8, "head_dim": 64}, tokens, 5, "cpu", torch.float32
    )
    chosen = decode.contenders([1024, 1024], [])
    for name in ("standard", "selective, budgets"):
        found = decode.peak_bytes(decode.filled_cache, setup, chosen[name], device=torch.device("cpu"))
        size = decode.expected_bytes(setup, chosen[name])
        assert size <= found <= size + 6 * 2**20  # what else the process takes meanwhile


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--contexts 64", "--contexts 64: expected more than --steps 64"),
        ("--contexts 100", "--contexts 100: no factor is known for it; give --factors"),
        ("--contexts 512 1024 --factors 3", "--factors: 1 for 2 contexts"),
        ("--factors 1 2 3 0.5", "--factors 0.5: expected 1 or more"),
        ("--layers 0", "--layers 0: expected 1 or more"),
        ("--steps 0", "--steps 0: expected 1 or more"),
        ("--patience 0", "--patience 0.0: expected a number of seconds above 0"),
        ("--device gpu", "--device gpu: expected cpu, cuda or cuda:N"),
        ("--checkpoint a.ckpt --heads 2", "--heads with --checkpoint: the checkpoint decides it"),
        ("--checkpoint a.ckpt --contexts 128", "--contexts with --checkpoint: the checkpoint decides it"),
        ("--checkpoint a.ckpt --budgets 8 --factors 2", "--budgets with --factors"),
        ("--budgets 8", "--budgets 8: only read with --checkpoint"),
        ("--data-root a", "--data-root a: only read with --checkpoint"),
        ("--json nowhere/a.json", "--json nowhere/a.json: expected a file's name in a folder that exists"),
        ("--checkpoint nowhere/a.ckpt", "nowhere/a.ckpt: no such file"),
    ],
)
def test_bad_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        decode.main(arguments.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_trained_checkpoint_and_its_budgets(tmp_path, tiny, capsys):
    train(tiny(tmp_path / "run", "attention.selection_head=1", "sample=null", "trainer.max_steps=2"))
    common = ["--checkpoint", str(tmp_path / "run"), "--steps", "4", "--rounds", "1", "--no-memory", "--device", "cpu"]
    decode.main([*common, "--budgets", "8"])
    printed = capsys.readouterr().out
    assert "context 32: a prompt of 28 tokens, then 4 decoded" in printed
    row = next(line for line in printed.splitlines() if line.startswith("selective, budgets"))
    assert row.split()[-1] == "4.0"
    with pytest.raises(SystemExit):
        decode.main([*common, "--budgets", "1"])
    assert "budgets=1" in capsys.readouterr().err
