"""The campaign's own judgement, and its quick part: a few real faults that must come back exactly."""

from __future__ import annotations

import random
import shutil
from types import SimpleNamespace

import pytest
import torch

from selmodel.training.checkpoint_file import write_checkpoint
from tests.faults import campaign
from tests.faults.campaign import Fault, Ground, chain, choose_kinds, judge, newest_step, table, write_report
from tests.faults.harness import EVERY, LIMIT, Moment, differences, equal, is_validating, resumed_at, rows
from tests.faults.kinds import KINDS, WEIGHTS, Outcome

SAID = "resuming from /r/last.ckpt at step 20\n"


def struck(**outcome):
    return Fault("SIGKILL", "step", Outcome(**{"seconds": 0.1, "code": -9, "at_step": 23, **outcome}), newest=20)


def test_a_fault_that_came_back_has_no_problem():
    fault = struck()
    judge(fault, "", SAID)
    assert fault.problems == []
    assert fault.lost == 3


@pytest.mark.parametrize(
    ("fault", "text", "problem"),
    [
        (struck(seconds=None), SAID, f"did not end within {LIMIT:.0f} s"),
        (
            struck(),
            "resuming from /r/last.ckpt at step 15\n",
            "went on from step 15, and the newest whole checkpoint was",
        ),
        (struck(), "run directory: /r\n", "went on from step 0"),
        (struck(at_step=21 + EVERY), SAID, f"{EVERY + 1} steps lost, from {21 + EVERY} to 20"),
        (struck(damaged=1, must_tell=True), SAID, "went on past a damaged checkpoint and did not say so"),
    ],
)
def test_what_is_not_as_promised_is_a_problem(fault, text, problem):
    judge(fault, "", text)
    assert any(problem in one for one in fault.problems)


def test_steps_since_a_damaged_checkpoint_and_after_failed_saves_are_allowed():
    fault = struck(damaged=1, must_tell=True, at_step=20 + 2 * EVERY)
    judge(fault, "", "/r/last.ckpt: is empty; passed over\n" + SAID)
    assert fault.problems == []
    fault = struck(at_step=40)
    judge(fault, "step 25: last.ckpt could not be written (No space left on device)", SAID)
    assert fault.problems == []


@pytest.fixture
def finished(tmp_path):
    """A run's files, and a way to change a copy of them."""
    header = "step,train/loss,train/grad_norm,train/grad_norm_max,train/lr,train/tokens\n"
    checkpoint = {
        "selmodel": {"format": 1, "step": 2}, "state_dict": {"w": torch.ones(3)}, "optimizer_states": [{"lr": 0.1}],
        "DataModule": {"step": 2}, "guards": {"skipped": 0},
    }  # fmt: skip
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "train.csv").write_text(header + "1,3.5,1.0,1.0,0.1,64\n2,3.25,1.0,1.0,0.1,128\n")
    (reference / "validation.csv").write_text("step,val/loss,val/bits_per_byte,val/tokens\n2,3.0,1.5,100\n")
    for name in ("last.ckpt", "best.ckpt"):
        write_checkpoint(checkpoint, reference / name)

    def copy(**changed):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(reference, run)
        if changed:
            write_checkpoint(checkpoint | changed, run / "last.ckpt")
        return run, reference

    return copy


def test_equal_runs_do_not_differ(finished):
    assert differences(*finished()) == []


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("3.25,", "3.2500000000000004,", "different from step 2 on"),
        ("1,3.5", "1,3.5,1.0,1.0,0.1,64\n1,3.5", "train.csv: 3 rows against 2"),
        ("2,3.25,1.0,1.0,0.1,128\n", "", "train.csv: 1 rows against 2"),
    ],
)
def test_a_loss_that_differs_in_its_last_bit_or_a_row_too_many_is_found(finished, old, new, difference):
    run, reference = finished()
    text = (run / "train.csv").read_text()
    assert old in text
    (run / "train.csv").write_text(text.replace(old, new))
    assert any(difference in one for one in differences(run, reference))


@pytest.mark.parametrize(
    "changed",
    [
        {"state_dict": {"w": torch.tensor([1.0, 1.0, 1.0000001])}},
        {"optimizer_states": [{"lr": 0.2}]},
        {"DataModule": {"step": 1}},
        {"guards": {"skipped": 1}},
        {"selmodel": {"format": 1, "step": 3}},
    ],
)
def test_every_part_of_a_checkpoint_is_compared(finished, changed):
    assert any(one.startswith("last.ckpt") for one in differences(*finished(**changed)))


def test_a_checkpoint_that_is_missing_or_damaged_is_a_difference(finished):
    run, reference = finished()
    (run / "best.ckpt").unlink()
    (run / "last.ckpt").write_bytes(b"")
    assert [one.partition(":")[0] for one in differences(run, reference)] == ["last.ckpt", "best.ckpt"]


def test_tensors_of_another_type_are_not_equal():
    assert equal({"a": [torch.ones(2)]}, {"a": [torch.ones(2)]})
    assert not equal(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not equal([1], [1, 2])


def test_what_a_run_said_and_wrote_is_read(finished, tmp_path):
    run, _ = finished()
    assert newest_step(run) == 2
    (run / "last.ckpt").write_bytes(b"x")
    assert newest_step(run) == 2
    assert newest_step(tmp_path) == 0
    assert resumed_at("a\nresuming from x at step 3\nresuming from x at step 5\n") == 5
    assert resumed_at("nothing") == 0
    assert resumed_at("/r is finished: step 60 of trainer.max_steps=60") == 60
    (run / "train.csv").write_text("step,train/loss\n8,1.0\n9,")
    assert [row["step"] for row in rows(run / "train.csv")] == ["8"]  # the half-written row is none
    assert is_validating(run)


def test_kinds_and_moments_follow_from_the_seed():
    assert choose_kinds(120, 3, []) == choose_kinds(120, 3, []) != choose_kinds(120, 4, [])
    assert set(choose_kinds(100, 0, [])) == set(KINDS) == set(WEIGHTS)
    assert len(choose_kinds(100, 0, [])) == 100
    assert set(choose_kinds(5, 0, ["SIGKILL"])) == {"SIGKILL"}
    chosen = [Moment.choose(random.Random(seed)) for seed in range(300)]
    assert {moment.place for moment in chosen} == {"start", "step", "checkpoint", "validation"}
    assert Moment.choose(random.Random(7)) == Moment.choose(random.Random(7))


def test_a_process_that_ended_has_no_moment_left(tmp_path):
    ended = SimpleNamespace(run=tmp_path, ended=True, wait_until=lambda condition: condition(), text=lambda: "")
    for place in ("start", "step", "checkpoint", "validation"):
        assert not Moment(place, 1, 0.0).wait(ended)


def test_the_table_and_the_page(tmp_path):
    good = Fault("SIGKILL", "step", Outcome(0.1, -9, at_step=23), newest=20, lost=3, resumed=4.0)
    bad = Fault("SIGTERM", "validation", Outcome(2.0, 1), problems=["exit status 1 after SIGTERM"])
    borne = Fault("SIGKILL", "start", Outcome(0.0, went_on=True))
    lines = table([good, bad, borne])
    assert lines[2] == "| SIGKILL | 2 | 2 | 1 | 3 (3) | 0.1 (0.1) | 4.0 (4.0) |"
    assert lines[-1].startswith("| **all** | 3 | 2 | 1 | ")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{campaign.BEGIN}old\n{campaign.END}\nafter\n")
    write_report(page, [good, bad, borne], "make faults", 3.0, ["full disk (no mount)"])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "1 did not come back as promised" in text
    assert "- SIGTERM while validating: exit status 1 after SIGTERM" in text
    assert "Not tried: full disk (no mount)." in text
    assert "Every one came back exactly" not in text


@pytest.mark.slow
def test_real_faults_come_back_exactly(tmp_path):
    """Killed, asked to stop, and with the newest checkpoint damaged, one after the other in one run."""
    ground = Ground.prepare(tmp_path, seed=1, two_ranks=False)
    faults, left = chain(0, ["SIGKILL", "newest checkpoint, a bit flipped", "SIGTERM"], ground)
    assert [fault.problems for fault in faults] == [[]] * len(faults)
    assert len(faults) + len(left) == 3
    assert faults
