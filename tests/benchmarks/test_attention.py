"""The attention benchmark: its inputs, its table, its file, and its answers to bad options."""

from __future__ import annotations

import json

import attention
import pytest
import torch
from measuring import Skipped

from selmodel.attention import SelectiveAttention
from selmodel.attention.kernels import KERNELS
from selmodel.model import Transformer
from selmodel.training.run import train

CPU = torch.device("cpu")
TINY = "--batch 1 --heads 2 --head-dim 8 --rounds 1 --no-memory --device cpu"


def run(command: str, *more: str) -> None:
    attention.main([*command.split(), *more])


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(
        50, SelectiveAttention, n_layers=2, n_heads=2, n_kv_heads=1, d_model=16, head_dim=8, context_length=40
    )
    model.init_weights(0)
    with torch.no_grad():
        for block in model.blocks:
            # Queries like their keys, and large: then something is selected, and some keys die.
            block.attention.wq.weight *= 100
            block.attention.wk.weight.copy_(block.attention.wq.weight[:8])
    return model


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(50, (3, 40), generator=torch.Generator().manual_seed(0))


def test_layers_are_what_the_attention_of_the_model_gets(model, tokens):
    layers = attention.model_layers(model, tokens, torch.float32, CPU)
    outputs = []
    for block in model.blocks:
        block.attention.register_forward_hook(lambda module, args, out: outputs.append(out[0]))
    model(tokens)
    assert len(layers) == 2
    for layer, block, out in zip(layers, model.blocks, outputs, strict=True):
        assert layer.q.transpose(1, 2).is_contiguous()
        assert layer.grad.shape == layer.q.shape
        attended, _ = KERNELS["eager"](layer.q, layer.k, layer.v)
        torch.testing.assert_close(block.attention.wo(attended.transpose(1, 2).flatten(2)), out)


def test_the_beginning_of_a_layer_is_that_of_a_shorter_text(model, tokens):
    whole = attention.model_layers(model, tokens, torch.float32, CPU)
    short = attention.model_layers(model, tokens[:, :17], torch.float32, CPU)
    for one, other in zip(whole, short, strict=True):
        beginning = one.beginning(17)
        assert beginning.q.stride() == other.q.stride()
        # A product over other shapes sums in another order.
        for x, y in zip(beginning.tensors[:3], other.tensors[:3], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_live_shares_are_those_that_training_logs(model, tokens):
    shares = model.selection_statistics(tokens).live_share
    layers = attention.model_layers(model, tokens, torch.float32, CPU)
    torch.testing.assert_close(torch.tensor([layer.live_share for layer in layers]), shares)
    assert 0.01 < shares.min() < 0.99


def test_table_and_file(tmp_path, capsys):
    file = tmp_path / "figures.json"
    run(f"{TINY} --contexts 20 33 --only eager blockwise-live --json", str(file))
    printed = capsys.readouterr().out
    assert printed.count("context ") == 2
    assert "eager          " in printed.split("context 20")[0]  # the error against the definition
    tables = printed[printed.index("context 20") :].splitlines()
    rows = [line.split() for line in tables if line.startswith(("standard", "eager", "blockwise"))]
    assert [row[0] for row in rows] == ["standard", "eager", "blockwise-live"] * 2
    assert rows[0][1] == rows[0][3] == "1.00"  # the ratio to itself
    report = json.loads(file.read_text())
    assert report["relative_errors"]["eager"]["forward_backward"] < 1e-6
    assert [result["context"] for result in report["results"]] == [20, 33]
    taken = report["results"][0]["contenders"]
    ratio = taken["eager"]["forward"] / taken["standard"]["forward"]
    assert float(rows[1][1]) == pytest.approx(ratio, abs=0.006)
    assert taken["eager"]["peak_bytes"] == "--no-memory"


def test_a_table_worked_by_hand():
    slow = Skipped("one call took 30 s")
    lines = attention.table(
        "title",
        {
            "standard": {"forward": 0.002, "forward_backward": 0.01, "peak_bytes": 3 * 2**20},
            "blockwise": {"forward": 0.003, "forward_backward": 0.0125, "peak_bytes": 9 * 2**19},
            "flex": {"forward": 0.001, "forward_backward": slow, "peak_bytes": slow},
        },
    )
    assert lines[:2] == ["", "title"]
    assert [line.split() for line in lines[4:]] == [
        ["standard", "1.00", "2.0", "1.00", "10.0", "3.0"],
        ["blockwise", "1.50", "3.0", "1.25", "12.5", "4.5"],
        ["flex", "0.50", "1.0", "-", "-", "-"],
        ["no", "forward+backward,", "memory", "of", "flex:", "one", "call", "took", "30", "s"],
    ]
    assert len({len(line) for line in lines[4:7]}) == 1


def test_times_stand_without_a_ratio_when_standard_attention_was_skipped():
    slow = Skipped("too slow")
    lines = attention.table(
        "title",
        {
            "standard": {"forward": slow, "forward_backward": slow, "peak_bytes": slow},
            "blockwise": {"forward": 0.003, "forward_backward": 0.0125, "peak_bytes": 2**20},
        },
    )
    assert [line.split() for line in lines[4:]] == [
        ["standard", "-", "-", "-", "-", "-"],
        ["blockwise", "-", "3.0", "-", "12.5", "1.0"],
        ["no", "forward,", "forward+backward,", "memory", "of", "standard:", "too", "slow"],
    ]


def test_too_large_logits_are_skipped_and_said(capsys):
    """4 numbers of 4 bytes for each of 64 x 64 pairs and 2 heads: 0.000122 GiB."""
    run(f"{TINY} --contexts 64 --only eager blockwise --memory-limit 0.0001")
    printed = capsys.readouterr().out
    assert "of eager: needs about 0.000122 GiB for its 64 x 64 logits, more than the 0.0001 GiB" in printed
    assert "of blockwise" not in printed


def test_memory_is_measured(capsys):
    """Outputs and three gradients of standard attention: 4 x 4 sequences x 300 tokens x 256 features x 4 bytes."""
    run("--contexts 300 --only standard --heads 4 --rounds 1 --device cpu")
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("standard"))
    assert 4.5 <= float(row.split()[-1]) <= 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--contexts 8 0", "--contexts 0: expected numbers of tokens, 1 or more"),
        ("--batch 0", "--batch 0: expected 1 or more"),
        ("--kv-heads 0", "--kv-heads 0: expected 1 or more"),
        ("--patience nan", "--patience nan: expected a number above 0"),
        ("--memory-limit 0", "--memory-limit 0.0: expected a number above 0"),
        ("--heads 8 --kv-heads 3", "--kv-heads 3: expected a divisor of --heads 8"),
        ("--json nowhere/a.json", "--json nowhere/a.json: expected a file's name in a folder that exists"),
        ("--json .", "--json .: expected a file's name in a folder that exists"),
        ("--only blokwise", "invalid choice: 'blokwise'"),
        ("--device gpu", "--device gpu: expected cpu, cuda or cuda:N"),
        ("--checkpoint a.ckpt --heads 4", "--heads with --checkpoint: the checkpoint decides it; leave it out"),
        ("--data-root a", "--data-root a: only read with --checkpoint"),
        ("--checkpoint nowhere/a.ckpt", "nowhere/a.ckpt: no such file"),
    ],
)
def test_bad_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        attention.main(arguments.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_trained_checkpoint(tmp_path, tiny, capsys):
    train(tiny(tmp_path / "run", "trainer.max_steps=2", "sample=null"))
    checkpoint = str(tmp_path / "run" / "last.ckpt")
    options = f"--batch 2 --rounds 1 --no-memory --device cpu --checkpoint {checkpoint}"
    run(f"{options} --contexts 20 --only blockwise-live")
    printed = capsys.readouterr().out
    assert "context 20, batch 2, 2 heads of 16; 2 layers of " in printed
    assert "live pairs 100%, 100%" in printed  # after two steps nothing is dead
    for arguments, message in (
        ("--contexts 33", "--contexts 33 with --checkpoint"),
        ("--batch 5000", "--batch 5000: the run's validation text has "),
        ("--data-root nowhere", "nowhere"),
    ):
        with pytest.raises(SystemExit):
            run(f"{options} {arguments}")
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("attention=standard", "its attention is not selective; take a run of attention=selective"),
        ("attention.selection_head=1", "its selection head is not 0"),
        ("data.document_mask=true", "it was trained with data.document_mask=true; take one without"),
    ],
)
def test_checkpoints_of_another_kind(tmp_path, tiny, capsys, option, message):
    train(tiny(tmp_path / "run", option, "trainer.max_steps=1", "sample=null"))
    with pytest.raises(SystemExit):
        attention.main(["--checkpoint", str(tmp_path / "run" / "last.ckpt"), "--batch", "1", "--device", "cpu"])
    assert message in capsys.readouterr().err
