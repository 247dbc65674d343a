"""Where an evaluation's figures go."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from selmodel.evaluation.setup import output_path


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "evaluation-last.json"),
        ({"data": {"workers": 3, "validation_batch_size": 7, "mirror": "http://a"}}, "evaluation-last.json"),
        ({"data": {"validation_sequences": 64}}, "evaluation-last+data.validation_sequences-64.json"),
        ({"precision": "bf16-mixed"}, "evaluation-last+precision-bf16-mixed.json"),
        ({"output": "other.json", "precision": "32"}, "other.json"),
    ],
)
def test_other_data_do_not_replace_the_figures_of_the_runs_own(changes, name):
    data = dict.fromkeys(("root", "mirror", "workers", "validation_sequences", "validation_batch_size"))
    cfg = OmegaConf.merge({"output": None, "precision": None, "data": data}, changes)
    expected = Path(name) if "output" in changes else Path("run") / name
    assert output_path(cfg, Path("run/last.ckpt")) == expected


def test_two_roots_of_one_name_are_told_apart():
    data = {"root": None, "validation_sequences": None}
    names = {
        output_path(
            OmegaConf.create({"output": None, "precision": None, "data": {**data, "root": root}}), Path("run/best.ckpt")
        ).name
        for root in ("/a/c4", "/b/c4")
    }
    assert len(names) == 2
    assert all(name.startswith("evaluation-best+data.root-c4-") for name in names)
