import csv

import pytest

from selmodel.errors import UserError
from selmodel.training.loggers import CSVMetrics, Table, wandb_logger


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_come_back_to_the_last_bit(tmp_path):
    values = [0.1, 1 / 3, 1e-300, 12345678.123456789]
    for step, value in enumerate(values):
        CSVMetrics(tmp_path).log_metrics({"train/loss": value}, step)
    assert [float(row["train/loss"]) for row in read(tmp_path / "train.csv")] == values


def test_training_and_validation_have_files_of_their_own(tmp_path):
    logger = CSVMetrics(tmp_path)
    logger.log_metrics({"train/loss": 1.0, "train/tokens": 5}, 1)
    logger.log_metrics({"val/loss": 2.0, "train/tokens": 5}, 1)
    assert read(tmp_path / "train.csv") == [{"step": "1", "train/loss": "1.0", "train/tokens": "5"}]
    assert read(tmp_path / "validation.csv") == [{"step": "1", "val/loss": "2.0", "train/tokens": "5"}]


def test_a_later_column_keeps_the_earlier_rows(tmp_path):
    table = Table(tmp_path / "t.csv")
    table.append({"step": 1, "a": 0.5})
    table.append({"step": 2, "a": 0.25, "b": 7})
    table.append({"step": 3, "a": 0.125})
    assert read(tmp_path / "t.csv") == [
        {"step": "1", "a": "0.5", "b": ""},
        {"step": "2", "a": "0.25", "b": "7"},
        {"step": "3", "a": "0.125", "b": ""},
    ]


def test_a_second_start_appends(tmp_path):
    CSVMetrics(tmp_path).log_metrics({"train/loss": 1.0}, 1)
    CSVMetrics(tmp_path).log_metrics({"train/loss": 0.5}, 2)
    assert [row["step"] for row in read(tmp_path / "train.csv")] == ["1", "2"]


def test_rewind_sets_later_rows_aside_and_loses_none(tmp_path):
    logger = CSVMetrics(tmp_path)
    for step in range(1, 6):
        logger.log_metrics({"train/loss": step / 8}, step)
    CSVMetrics(tmp_path).rewind(3)
    assert [row["step"] for row in read(tmp_path / "train.csv")] == ["1", "2", "3"]
    assert [row["step"] for row in read(tmp_path / "train.overtaken.csv")] == ["4", "5"]


def test_a_half_written_line_is_dropped_on_rewind(tmp_path):
    logger = CSVMetrics(tmp_path)
    logger.log_metrics({"train/loss": 1.0}, 1)
    with (tmp_path / "train.csv").open("a") as file:
        file.write("2,0.")
    again = CSVMetrics(tmp_path)
    again.rewind(1)
    again.log_metrics({"train/loss": 0.5}, 2)
    assert read(tmp_path / "train.csv") == [{"step": "1", "train/loss": "1.0"}, {"step": "2", "train/loss": "0.5"}]


def test_wandb_without_a_key_is_offline_and_keeps_its_id(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    logger = wandb_logger(tmp_path / "run")
    assert logger._wandb_init["mode"] == "offline"
    again = wandb_logger(tmp_path / "run")
    assert logger.version == again.version == (tmp_path / "run" / "wandb_id").read_text()
    other = wandb_logger(tmp_path / "other")
    assert other.version != logger.version


def test_wandb_online_without_a_key_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"logger\.wandb\.mode=online"):
        wandb_logger(tmp_path / "run", mode="online")
    with pytest.raises(UserError, match=r"logger\.wandb\.mode=onlin:"):
        wandb_logger(tmp_path / "run", mode="onlin")
