"""A sweep's jobs: their names, their list, and what is refused."""

from __future__ import annotations

import json

import pytest

from selmodel.errors import UserError
from selmodel.sweep.grid import Job, is_of_a_job, key_of, make_jobs, read_manifest, sweep_name, write_manifest


def test_jobs_are_named_by_what_varies_alone():
    combinations = [
        ["experiment=mini", "attention=standard", "model.n_heads=2", "hydra.verbose=true", "sweep.parallel=2"],
        ["experiment=mini", "attention=selective", "model.n_heads=2", "hydra.verbose=true", "sweep.parallel=2"],
    ]
    jobs = make_jobs(combinations, ["attention", "model.n_heads"])
    assert [job.name for job in jobs] == [
        "attention-standard+model.n_heads-2",
        "attention-selective+model.n_heads-2",
    ]
    assert jobs[0].overrides == ("experiment=mini", "attention=standard", "model.n_heads=2")


def test_names_do_not_depend_on_the_order_or_the_number_of_jobs():
    one = make_jobs([["a.b=1", "seed=0"]], ["a.b", "seed"])
    many = make_jobs([["seed=1", "a.b=2"], ["seed=0", "a.b=1"]], ["seed", "a.b"])
    assert one[0].name == many[1].name


def test_jobs_that_would_share_a_folder_are_refused():
    with pytest.raises(UserError, match=r"a sweep over data.workers: does not change what a run computes"):
        make_jobs([["data.workers=0"], ["data.workers=1"]], ["data.workers"])


def test_a_sweep_is_named_by_what_its_jobs_share():
    assert sweep_name(["experiment=perplexity_vs_heads/mini", "hydra.verbose=true", "sweep.parallel=2"]) == (
        "experiment-perplexity_vs_heads-mini"
    )
    assert sweep_name(["sweep.parallel=2"]) == "sweep"


@pytest.mark.parametrize(
    ("override", "key", "of_a_job"),
    [
        ("model.n_heads=4", "model.n_heads", True),
        ("+optim.lr=1", "optim.lr", True),
        ("hydra/launcher=processes", "hydra/launcher", False),
        ("hydra.verbose=true", "hydra.verbose", False),
        ("sweep.parallel=2", "sweep.parallel", False),
        ("sweeping=2", "sweeping", True),
    ],
)
def test_keys(override, key, of_a_job):
    assert key_of(override) == key
    assert is_of_a_job(override) == of_a_job


def test_the_list_grows_and_loses_nothing(tmp_path):
    first, second = Job("a", ("x=1",)), Job("b", ("x=2",))
    write_manifest(tmp_path, [first])
    write_manifest(tmp_path, [second])
    write_manifest(tmp_path, [Job("a", ("x=1", "y=3"))])
    assert read_manifest(tmp_path) == [Job("a", ("x=1", "y=3")), second]


def test_a_folder_without_a_list_is_read_by_its_runs(tmp_path):
    for name in ("b/c", "a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("")
    assert read_manifest(tmp_path) == [Job("a", ()), Job("b/c", ())]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": "x", "jobs": []}', '{"format": "selmodel.sweep/1"}'])
def test_a_damaged_list_is_named(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(UserError, match=r"sweep.json: is not the list of a sweep's jobs"):
        read_manifest(tmp_path)


def test_folders_that_are_no_sweep(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds neither sweep.json nor a run"):
        read_manifest(tmp_path)


def test_the_file_is_plain(tmp_path):
    write_manifest(tmp_path, [Job("a", ("x=1",))])
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert content == {"format": "selmodel.sweep/1", "jobs": [{"name": "a", "overrides": ["x=1"]}]}
