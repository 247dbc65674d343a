"""The benchmark of the training step: that its step is the one of training, its table, its answers to bad options."""

from __future__ import annotations

import json

import lightning
import pytest
import step
import torch
from measuring import Skipped

from selmodel.training.module import LanguageModel
from selmodel.training.optim import AdamW
from selmodel.training.run import train

SIZES = {"vocab_size": 50, "n_layers": 2, "n_heads": 2, "d_model": 32, "head_dim": 16, "context_length": 20}


@pytest.fixture
def setup() -> step.Setup:
    tokens = torch.randint(50, (3, 21), generator=torch.Generator().manual_seed(0))
    # A clip that bites, and a rate at which a step is seen.
    optim = AdamW(lr=1e-2, schedule="constant", schedule_steps=1, warmup_steps=0, gradient_clip=0.1)
    return step.Setup(SIZES, tokens, "cpu", optim=optim)


def run(command: str, *more: str) -> None:
    step.main([*command.split(), *more])


class OneBatch(lightning.LightningDataModule):
    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens

    def train_dataloader(self):
        return torch.utils.data.DataLoader([{"tokens": self.tokens}] * 2, batch_size=None)

    def mark_trained(self, batch):
        pass


@pytest.mark.parametrize("name", ["standard", "eager", "blockwise-live"])
def test_a_step_is_that_of_training(setup, name, tmp_path):
    """Two steps here, and two by the Trainer, give the same weights to the last bit."""
    trained = LanguageModel(setup.model(name), setup.optim)
    initial = [p.detach().clone() for p in trained.parameters()]
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(trained, datamodule=OneBatch(setup.tokens))
    one = setup.step(name)
    one()
    one()
    assert all(map(torch.equal, one.model.parameters(), trained.parameters()))
    assert not any(map(torch.equal, initial, trained.parameters()))


def test_models_differ_in_attention_alone(setup):
    models = {name: setup.model(name) for name in step.KINDS if not name.startswith("triton")}
    assert list(models) == ["standard", "eager", "blockwise", "blockwise-live"]
    for model in models.values():
        assert all(map(torch.equal, model.parameters(), models["standard"].parameters()))
    layers = {name: model.blocks[0].attention for name, model in models.items() if name != "standard"}
    assert {name: (layer.kernel.name, layer.live_keys) for name, layer in layers.items()} == {
        "eager": ("eager", "off"),
        "blockwise": ("blockwise", "off"),
        "blockwise-live": ("blockwise", "auto"),
    }


def test_measuring_leaves_a_trained_model_as_it_is(setup):
    setup.optim = step.OPTIM
    one = setup.step("blockwise")
    one()
    for x, y in zip(one.model.parameters(), setup.model("blockwise").parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-9)  # one step of 1e-9


def test_gradients_are_memory_of_the_step(setup):
    one = step.prepared("standard", setup)
    assert all(p.grad is None for p in one.model.parameters())
    assert one.optimizer.state  # there already, so it is not


def test_a_table_worked_by_hand():
    lines = step.table(
        {
            "standard": {"seconds": 0.5, "peak_bytes": 2**20},
            "blockwise": {"seconds": 0.55, "peak_bytes": Skipped("not measured")},
            "eager": {"seconds": Skipped("one call took 90 s"), "peak_bytes": Skipped("not measured")},
        },
        tokens=2000,
    )
    assert [line.split() for line in lines[2:]] == [
        ["standard", "1.00", "500", "4,000", "1"],
        ["blockwise", "1.10", "550", "3,636", "-"],
        ["eager", "-", "one", "call", "took", "90", "s"],
    ]


def test_table_and_file(tmp_path, capsys):
    file = tmp_path / "figures.json"
    tiny = "--context 16 --batch 2 --layers 1 --heads 1 --vocab-size 40 --rounds 1 --no-memory --device cpu"
    run(f"{tiny} --only blockwise --json", str(file))
    printed = capsys.readouterr().out
    assert "1 layers, 1 heads, d_model 64, 2 sequences of 16 tokens" in printed
    steps = json.loads(file.read_text())["steps"]
    assert list(steps) == ["standard", "blockwise"]
    row = next(line.split() for line in printed.splitlines() if line.startswith("blockwise"))
    assert float(row[1]) == pytest.approx(steps["blockwise"]["seconds"] / steps["standard"]["seconds"], abs=0.006)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--context 1", "--context 1: expected 2 or more"),
        ("--layers 0", "--layers 0: expected 1 or more"),
        ("--vocab-size 1", "--vocab-size 1: expected 2 or more"),
        ("--patience 0", "--patience 0.0: expected a number of seconds above 0"),
        ("--device gpu", "--device gpu: expected cpu, cuda or cuda:N"),
        ("--checkpoint a.ckpt --context 64", "--context with --checkpoint: the checkpoint decides it; leave it out"),
        ("--data-root a", "--data-root a: only read with --checkpoint"),
        ("--json nowhere/a.json", "--json nowhere/a.json: expected a file's name in a folder that exists"),
        ("--checkpoint nowhere/a.ckpt", "nowhere/a.ckpt: no such file"),
    ],
)
def test_bad_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        step.main(arguments.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is missing without CUDA")
def test_triton_without_a_device(capsys):
    with pytest.raises(SystemExit):
        run("--only triton --layers 1 --heads 1 --context 16 --device cpu")
    assert "error: attention.kernel=triton: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_trained_checkpoint(tmp_path, tiny, capsys):
    options = ("attention.qk_norm=true", "attention.selection_head=1", "model.positions=rope", "sample=null")
    train(tiny(tmp_path / "run", *options, "trainer.max_steps=2"))
    checkpoint = tmp_path / "run" / "last.ckpt"
    setup, shares = step.trained_setup(checkpoint, None, 2, "cpu")
    assert setup.tokens.shape == (2, 33)
    assert shares == [1.0, 1.0]
    layer = setup.model("blockwise").blocks[1].attention
    assert (layer.qk_norm, layer.selection_head) == (True, 1)
    stored = torch.load(checkpoint, weights_only=True)["state_dict"]
    standard = setup.model("standard")
    assert standard.blocks[0].attention.qk_norm
    for name, weight in standard.state_dict().items():
        assert torch.equal(weight, stored[f"model.{name}"])
    run("--batch 1 --only eager --rounds 1 --no-memory --device cpu --checkpoint", str(checkpoint))
    assert "live pairs by layer: 100%, 100%" in capsys.readouterr().out
