from selmodel.naming import run_name


def test_the_order_of_overrides_does_not_matter():
    assert run_name(["model.depth=4", "attention=selective"]) == "attention=selective,model.depth=4"
    assert run_name(["attention=selective", "model.depth=4"]) == "attention=selective,model.depth=4"


def test_nothing_typed():
    assert run_name([]) == "default"


def test_options_without_effect_on_the_result_do_not_count():
    overrides = ["resume=never", "trainer.devices=2", "logger=wandb", "data.workers=3", "optim.lr=0.1"]
    assert run_name(overrides) == "optim.lr=0.1"
    assert run_name(["trainer.max_steps=5", "trainer=cpu"]) == "trainer.max_steps=5"


def test_different_values_that_look_alike_in_a_file_name_differ():
    names = {run_name([f"data.root={root}"]) for root in ("/a/b", "/a_b", "/a b", "a/b", "a-b")}
    assert len(names) == 5
    assert all("/" not in name and " " not in name for name in names)


def test_long_names_are_cut_and_stay_apart():
    one = run_name([f"model.option_{i}={i}" for i in range(40)])
    two = run_name([f"model.option_{i}={i + 1}" for i in range(40)])
    assert len(one) <= 120
    assert one != two
