from selmodel.naming import run_name


def test_the_order_of_overrides_does_not_matter():
    assert run_name(["model.depth=4", "attention=selective"]) == "attention-selective+model.depth-4"
    assert run_name(["attention=selective", "model.depth=4"]) == "attention-selective+model.depth-4"


def test_nothing_typed():
    assert run_name([]) == "default"


def test_options_without_effect_on_the_result_do_not_count():
    overrides = ["resume=never", "trainer.devices=2", "logger=wandb", "data.workers=3", "optim.lr=0.1"]
    assert run_name(overrides) == "optim.lr-0.1"
    assert run_name(["trainer.max_steps=5", "trainer=cpu"]) == "trainer.max_steps-5"


def test_different_values_that_look_alike_in_a_file_name_differ():
    names = {run_name([f"data.root={root}"]) for root in ("/a/b", "/a_b", "/a b", "a/b", "a-b")}
    assert len(names) == 5
    assert all("/" not in name and " " not in name for name in names)


def test_of_a_path_the_last_part_is_kept():
    name = run_name(["data.root=/some/where/c4_mini", "experiment=mini"])
    assert name.startswith("data.root-c4_mini+experiment-mini-")


def test_an_experiment_keeps_its_folder():
    assert run_name(["experiment=paper/base"]) == "experiment-paper-base"


def test_long_names_are_cut_and_stay_apart():
    one = run_name([f"model.option_{i}={i}" for i in range(40)])
    two = run_name([f"model.option_{i}={i + 1}" for i in range(40)])
    assert len(one) <= 120
    assert one != two


def test_a_name_can_be_typed_as_a_value_without_quotes():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    name = run_name(["+a.b=[1,2]", "model.n_heads=4", "data.root=/x y/é=1", "optim.lr=-1"])
    (override,) = OverridesParser.create().parse_overrides([f"checkpoint=/tmp/runs/{name}/last.ckpt"])
    assert override.value() == f"/tmp/runs/{name}/last.ckpt"


def test_what_looks_like_a_separator_inside_a_value_makes_no_collision():
    assert run_name(["a=b+c=d"]) != run_name(["a=b", "c=d"])
    assert run_name(["a=-b"]) != run_name(["a=b"])


def test_of_an_option_typed_twice_the_last_value_counts():
    assert run_name(["a=1", "a=2"]) == run_name(["a=2"]) != run_name(["a=2", "a=1"])
