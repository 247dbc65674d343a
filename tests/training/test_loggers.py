import contextlib
import csv
import math
import resource

import pytest

from selmodel.errors import UserError
from selmodel.training.loggers import CSVMetrics, Table, rows_logged, summary_metrics


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


def test_the_rows_of_all_starts_are_counted_whole_ones_only(tmp_path):
    assert rows_logged(tmp_path / "nowhere") == 0
    logger = CSVMetrics(tmp_path)
    for step in range(1, 6):
        logger.log_metrics({"train/loss": 1.0}, step)
    logger.log_metrics({"val/loss": 1.0}, 5)
    CSVMetrics(tmp_path).rewind(3)  # moves two rows of train.csv and the one of validation.csv
    assert rows_logged(tmp_path) == 6
    with (tmp_path / "train.csv").open("a") as file:
        file.write("4,0.")
    assert rows_logged(tmp_path) == 6


def test_the_summary_is_of_the_last_and_of_the_best_validation(tmp_path):
    assert summary_metrics(tmp_path) == {}
    logger = CSVMetrics(tmp_path)
    for step, loss in ((1, math.inf), (2, 1.0), (3, 0.5), (4, 0.5), (5, math.nan)):
        figures = {"val/loss": loss, "val/perplexity": math.exp(loss), "val/bits_per_byte": loss / 4, "val/tokens": 9}
        logger.log_metrics(figures | {"train/tokens": 100 * step}, step)
    summary = summary_metrics(tmp_path)
    assert {key: value for key, value in summary.items() if key.startswith("best/")} == {
        "best/step": 3, "best/tokens": 300, "best/loss": 0.5, "best/perplexity": math.exp(0.5),
        "best/bits_per_byte": 0.125,
    }  # fmt: skip
    assert (summary["final/step"], summary["final/tokens"]) == (5, 500)
    assert math.isnan(summary["final/loss"])


# --- a disk that refuses ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def room_for(n_bytes):
    """No file may grow beyond ``n_bytes``, as on a full disk: what is written is cut off there."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("room", [0, 1, 7, 11])
def test_a_row_that_does_not_fit_leaves_nothing_of_itself(tmp_path, room):
    """Whether none of it fits or half of it: half a row would run into the next one."""
    table = Table(tmp_path / "train.csv")
    table.append({"step": 1, "train/loss": 0.5})
    before = table.path.read_text()
    with room_for(len(before) + room), pytest.raises(OSError, match=r"File too large|No space left"):
        table.append({"step": 12345, "train/loss": 0.25})
    assert table.path.read_text() == before
    table.append({"step": 3, "train/loss": 0.125})
    assert [row["step"] for row in table.rows()] == ["1", "3"]


def test_rows_wait_for_room_and_none_is_lost(tmp_path, caplog):
    metrics = CSVMetrics(tmp_path)
    metrics.log_metrics({"train/loss": 1.0}, 1)
    size = (tmp_path / "train.csv").stat().st_size
    with room_for(size + 3):
        for step in (2, 3, 4):
            metrics.log_metrics({"train/loss": float(step)}, step)
        with pytest.raises(UserError, match=r"train\.csv in .* could not be written .*: 3 rows"):
            metrics.flush()
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1  # once, not at every row
    metrics.log_metrics({"train/loss": 5.0}, 5)
    metrics.flush()
    assert [row["step"] for row in read(tmp_path / "train.csv")] == ["1", "2", "3", "4", "5"]


def test_a_new_column_that_cannot_be_added_is_tried_again(tmp_path):
    metrics = CSVMetrics(tmp_path)
    metrics.log_metrics({"train/loss": 1.0}, 1)
    with room_for(10):
        metrics.log_metrics({"train/loss": 2.0, "train/skipped_steps": 1}, 2)
    assert (tmp_path / "train.csv").read_text() == "step,train/loss\n1,1.0\n"
    metrics.log_metrics({"train/loss": 3.0, "train/skipped_steps": 1}, 3)
    found = read(tmp_path / "train.csv")
    assert [(row["step"], row["train/skipped_steps"]) for row in found] == [("1", ""), ("2", "1"), ("3", "1")]
