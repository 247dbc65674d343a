"""The data module: what counts as trained, what a checkpoint keeps, and its place in a Lightning run."""

from __future__ import annotations

import io
import warnings
from itertools import islice
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from corpus import NumberSource, NumberTokenizer, number_source, oracle_batches

from selmodel.data.datamodule import DataModule
from selmodel.errors import UserError


def data_module(source=None, **options) -> DataModule:
    options = {"context_length": 7, "batch_size": 8, "streams": 8, **options}
    tokenizer = options.pop("tokenizer", NumberTokenizer())
    return DataModule(source or number_source(4, rows=60), tokenizer, **options)


def expected_batches(steps: int, source=None) -> list[np.ndarray]:
    source = source or number_source(4, rows=60)
    return list(islice(oracle_batches(source, streams=8, batch_size=8, context_length=7, seed=0), steps))


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_only_batches_marked_as_trained_count(workers):
    module = data_module(workers=workers)
    batches = list(islice(iter(module.train_dataloader()), 9))  # nine fetched, four trained on
    for batch in batches[:4]:
        module.mark_trained(batch)
    state = through_a_file(module.state_dict())
    assert state["step"] == 4
    resumed = data_module(workers=2 - workers)
    resumed.load_state_dict(state)
    for batch, expected in zip(resumed.train_dataloader(), expected_batches(9)[4:], strict=False):
        np.testing.assert_array_equal(batch["tokens"], expected)


def test_step_goes_on_from_the_state():
    module = data_module()
    module.mark_trained(next(iter(module.train_dataloader())))
    resumed = data_module()
    resumed.load_state_dict(module.state_dict())
    assert [batch["step"] for batch in islice(iter(resumed.train_dataloader()), 3)] == [1, 2, 3]


def test_a_state_loaded_after_the_loader_was_built_counts():
    trained = data_module()
    for batch in islice(iter(trained.train_dataloader()), 5):
        trained.mark_trained(batch)
    module = data_module()
    loader = module.train_dataloader()
    module.load_state_dict(trained.state_dict())
    np.testing.assert_array_equal(next(iter(loader))["tokens"], expected_batches(6)[5])


def test_a_state_is_a_snapshot():
    module = data_module()
    batches = iter(module.train_dataloader())
    module.mark_trained(next(batches))
    state = module.state_dict()
    before = state["streams"].clone()
    module.mark_trained(next(batches))
    assert torch.equal(state["streams"], before)
    resumed = data_module()
    resumed.load_state_dict(state)
    resumed.mark_trained(next(batches))
    assert torch.equal(state["streams"], before)


def test_state_holds_plain_values():
    state = data_module().state_dict()
    assert set(state) == {"step", "streams", "order"}
    assert state["streams"].dtype == torch.int64
    assert state["streams"].shape == (8, 4)
    assert all(type(value) in (int, str) for value in state["order"].values())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 1}, "data.seed: 0 in the checkpoint, 1 here"),
        ({"streams": 4}, "data.streams: 8 in the checkpoint, 4 here"),
        ({"context_length": 6}, "model.context_length: 7 in the checkpoint, 6 here"),
        ({"batch_size": 16}, "data.batch_size: 8 in the checkpoint, 16 here"),
        ({"tokenizer": NumberTokenizer(name="other")}, "tokenizer hash: "),
        ({"source": number_source(5, rows=60)}, "source fingerprint: "),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(changed, named):
    state = data_module().state_dict()
    with pytest.raises(UserError) as error:
        data_module(**changed).load_state_dict(state)
    assert named in str(error.value)
    assert str(error.value).count(" in the checkpoint, ") == 1


def test_workers_devices_and_masking_do_not_enter_the_order():
    state = data_module().state_dict()
    data_module(workers=3, document_mask=True, validation_sequences=5, prefetch=7).load_state_dict(state)


def test_rank_and_world_size_come_from_the_trainer():
    module = data_module()
    assert (module.rank, module.world_size) == (0, 1)
    module.trainer = SimpleNamespace(global_rank=1, world_size=4)
    assert (module.rank, module.world_size) == (1, 4)
    batch = next(iter(module.train_dataloader()))
    np.testing.assert_array_equal(batch["tokens"], expected_batches(1)[0][1::4])
    module.trainer = SimpleNamespace(global_rank=0, world_size=3)
    with pytest.raises(UserError, match="on 3 devices"):
        module.setup("fit")


def test_splits_that_share_a_shard_are_refused():
    class Overlapping(NumberSource):
        def shards(self, split):
            return super().shards("train")

    with pytest.raises(UserError, match="both the training and the validation split: train-00000"):
        data_module(Overlapping({"train": [["2 3 4"] * 9], "validation": [["2"]]})).setup("fit")


@pytest.mark.parametrize(
    ("option", "value"),
    [("workers", -1), ("prefetch", 0), ("validation_sequences", 0), ("validation_batch_size", 0), ("workers", "many")],
)
def test_options_out_of_range(option, value):
    with pytest.raises(UserError, match=f"data.{option}={value!r}: expected an integer"):
        data_module(**{option: value})


def test_validation_batch_size_follows_the_batch_up_to_a_bound():
    assert data_module().validation_batch_size == 8
    assert data_module(batch_size=1024).validation_batch_size == 32
    assert data_module(validation_batch_size=100).validation_batch_size == 100


def test_protocol_tells_validations_apart_and_nothing_else():
    protocol = data_module(validation_sequences=5).protocol()
    assert protocol["validation_sequences"] == 5
    assert protocol["validation_tokens"] == 35
    assert protocol["validation_bytes"] == data_module(validation_sequences=5).validation_set.n_bytes
    assert data_module(validation_sequences=5, seed=3, workers=2, batch_size=16).protocol() == protocol
    for changed in (
        {"validation_sequences": 6},
        {"context_length": 8},
        {"document_mask": True},
        {"tokenizer": NumberTokenizer(name="other")},
        {"source": number_source(5, rows=60)},
    ):
        assert data_module(**{"validation_sequences": 5, **changed}).protocol() != protocol


class Toy(lightning.LightningModule):
    """Trains one number and notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[np.ndarray] = []
        self.validated: list[int] = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((self.weight - batch["tokens"].float().mean()) ** 2)
        optimizer.step()
        self.seen.append(batch["tokens"].numpy())
        self.trainer.datamodule.mark_trained(batch)

    def on_validation_epoch_start(self):
        self.validated.append(0)

    def validation_step(self, batch, batch_idx):
        self.validated[-1] += 1


class SaveAtStep(lightning.Callback):
    def __init__(self, step: int, path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(tmp_path, workers: int = 0, resume=None, **options) -> Toy:
    model = Toy()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=10,
        val_check_interval=4,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=tmp_path,
        callbacks=[] if resume else [SaveAtStep(5, tmp_path / "five.ckpt")],
        **options,
    )
    module = data_module(workers=workers, validation_sequences=30, validation_batch_size=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, datamodule=module, ckpt_path=resume, weights_only=True if resume else None)
    assert not [str(w.message) for w in caught if "resum" in str(w.message)]
    return model


@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 10}])
def test_a_lightning_run_resumes_with_the_next_batch(tmp_path, limits):
    """Lightning fetches one batch ahead, so the checkpoint after step 5 is written when six have been handed out."""
    whole = fit(tmp_path, **limits)
    np.testing.assert_array_equal(whole.seen, expected_batches(10))
    assert whole.validated == [5, 5]
    rest = fit(tmp_path, workers=2, resume=tmp_path / "five.ckpt", **limits)
    np.testing.assert_array_equal(rest.seen, expected_batches(10)[5:])
    assert rest.validated == [5]  # the first validation after a resume runs all its batches
    assert torch.equal(rest.weight, whole.weight)
