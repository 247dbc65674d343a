"""suite=maps: S, F and what leaves, by hand; the page, safe from its texts; what is refused and not overwritten."""

from __future__ import annotations

import functools
import html.parser
import io
import json
import math
import sys

import hydra
import pytest
import torch

from selmodel.attention import SelectiveAttention
from selmodel.budgets import read_budgets
from selmodel.cli import CONFIGS
from selmodel.config import register_resolvers
from selmodel.data.tokenizer import SentencePieceTokenizer
from selmodel.data.tokenizer_training import train_sentencepiece
from selmodel.errors import UserError
from selmodel.evaluation import map_page
from selmodel.evaluation.map_figure import draw
from selmodel.evaluation.map_page import page
from selmodel.evaluation.maps import STAYS, LayerMap, TextMap, layer_maps, token_labels
from selmodel.evaluation.run import evaluate
from selmodel.model import Transformer
from selmodel.training.run import train
from tests.conftest import TINY
from tests.data.texts import prose

IDS = torch.randint(1, 40, (30,), generator=torch.Generator().manual_seed(0)).tolist()


def make(**options) -> Transformer:
    """wq and wk large enough that F matters."""
    attention = functools.partial(SelectiveAttention, selection_head=3)
    sizes = {"n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "d_model": 20, "context_length": 64}
    model = Transformer(40, attention, **{**sizes, **options})
    model.init_weights(0)
    for name, parameter in model.named_parameters():
        if "wq" in name or "wk" in name:
            parameter.data.mul_(6)
    return model.double()


def test_votes_of_the_first_layer_are_those_worked_out_by_hand():
    """q·k / sqrt(d) of the selection head and its group's keys, number by number."""
    model = make()
    S = layer_maps(model, IDS)[0].S
    x = model.embedding.weight[IDS] + model.position_embedding.weight[: len(IDS)]
    x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * model.blocks[0].attention_norm.weight
    attention = model.blocks[0].attention
    q = (x @ attention.wq.weight.T)[:, 3 * 6 : 4 * 6]  # head 3
    k = (x @ attention.wk.weight.T)[:, 6:12]  # of the second group
    for i in range(len(IDS)):
        for j in range(len(IDS)):
            expected = max(0.0, (q[i] @ k[j]).item() / math.sqrt(6)) if 0 < j < i else 0.0
            assert S[i, j].item() == pytest.approx(expected, abs=1e-6)
    assert S.count_nonzero() > 50


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_votes_of_all_layers_are_those_the_model_works_with(positions):
    model = make(positions=positions)
    found = layer_maps(model, IDS)
    statistics = model.selection_statistics(torch.tensor(IDS)[None])
    causal = torch.ones(len(IDS), len(IDS)).tril().bool()
    for layer, mean, above in zip(found, statistics.mean_F, statistics.share_F_above_1, strict=True):
        F = torch.cat([torch.zeros(1, len(IDS)), layer.S.cumsum(0)[:-1]])
        assert F[causal].mean().item() == pytest.approx(mean.item(), rel=1e-5)
        assert (F[causal] > 1).float().mean().item() == pytest.approx(above.item(), rel=1e-5)
        torch.testing.assert_close(layer.F, F[-1] + layer.S[-1])
        assert layer.F[0] == layer.F[-1] == 0


def test_what_leaves_is_what_the_rule_says_worked_through_by_hand():
    """In the first layer, whose votes no budget changes: after each query the key of the largest F leaves for good."""
    model, budgets = make(), [5, 7, 30]
    found = layer_maps(model, IDS, read_budgets(budgets, model))
    S, held, expected = found[0].S, [], [STAYS] * len(IDS)
    F = torch.zeros(len(IDS))
    for query in range(len(IDS)):
        held.append(query)
        F += S[query]
        if len(held) > 5:
            # Neither <BOS> nor the newest, whose F is 0; of equals the older one.
            leaving = max((key for key in held if key not in (0, query)), key=lambda key: (F[key].item(), -key))
            held.remove(leaving)
            expected[leaving] = query
    assert found[0].leaves.tolist() == expected
    for layer, budget in zip(found, budgets, strict=True):
        leaves = layer.leaves
        assert (leaves == STAYS).sum() == min(budget, len(IDS))
        assert leaves[0] == leaves[-1] == STAYS
        gone = leaves[leaves != STAYS]
        assert len(set(gone.tolist())) == len(gone)  # one with each query
        assert (leaves[1:] > torch.arange(1, len(IDS)))[leaves[1:] != STAYS].all()
    assert all(layer.leaves is None for layer in layer_maps(model, IDS))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("maps") / "t.model"
    train_sentencepiece(prose(300), path, vocab_size=500)
    return SentencePieceTokenizer(path)


def test_tokens_are_shown_as_text_and_what_is_none_by_name(tokenizer):
    text = "ba ce\n12 \N{GRINNING FACE}<s>"
    ids = [tokenizer.bos_id, *tokenizer.encode(text).tolist(), tokenizer.eos_id]
    labels = token_labels(tokenizer, ids)
    assert labels[0] == "⟨BOS⟩"
    assert labels[-1] == "⟨EOS⟩"
    shown = "".join(labels[1:-1])
    assert shown.replace("⟨F0⟩⟨9F⟩⟨98⟩⟨80⟩", "\N{GRINNING FACE}") == text
    assert "⟨F0⟩" in labels


NASTY = ["⟨BOS⟩", "</script><script>alert(1)</script>", "<!--", "&lt;", "\u2028", "'\"\\", "\n", "$x$"]


def made_up(labels=NASTY, *, leaves=True, n_layers=2, seed=0) -> TextMap:
    n = len(labels)
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(n_layers):
        S = torch.rand(n, n, generator=generator).mul(9).tril(-1)
        S[:, 0] = 0
        S[S < 3] = 0
        gone = torch.full((n,), STAYS)
        gone[1] = n - 1
        layers.append(LayerMap(S, S.sum(0), gone if leaves else None))
    facts = {
        "checkpoint": "run/<b>last.ckpt", "step": 3, "n_layers": n_layers, "selection_head": 0,
        "budgets": [4] * n_layers if leaves else None, "rule": "selective" if leaves else None,
    }  # fmt: skip
    return TextMap(list(range(n)), list(labels), layers, facts)


class Elements(html.parser.HTMLParser):
    """Counts a page's elements, and collects what a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.data, self.inside = [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        self.addresses += [values[name] for name in ("src", "href") if name in values]
        self.inside = values.get("id") == "data"

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.data += data


def test_texts_are_data_in_the_page_and_never_markup():
    plain = Elements(page(made_up(["a"] * len(NASTY))))
    nasty = Elements(page(made_up()))
    assert nasty.tags == plain.tags
    assert nasty.addresses == ["data:,"]  # the icon, so that none is asked for
    assert json.loads(nasty.data)["labels"] == NASTY
    assert "run/&lt;b&gt;last.ckpt" in page(made_up())


def test_the_data_are_the_votes(monkeypatch):
    found = made_up()
    data = json.loads(Elements(page(found)).data)
    for layer, stored in zip(found.layers, data["layers"], strict=True):
        S = torch.zeros_like(layer.S)
        S[stored["query"], stored["key"]] = torch.tensor(stored["votes"])
        torch.testing.assert_close(S, layer.S, rtol=6e-3, atol=0)  # three digits
        assert stored["F"] == pytest.approx(layer.F.tolist(), rel=6e-3)
        assert stored["leaves"] == layer.leaves.tolist()
        assert (stored["n"], stored["share"]) == (len(stored["votes"]), 1.0)
    monkeypatch.setattr(map_page, "MOST_VOTES", 5)
    stored = json.loads(Elements(page(found)).data)["layers"][0]
    assert len(stored["votes"]) == 5 < stored["n"]
    largest = found.layers[0].S.flatten().topk(5).values
    assert sorted(stored["votes"]) == pytest.approx(sorted(largest.tolist()), rel=6e-3)
    assert stored["share"] == pytest.approx((largest.sum() / found.layers[0].S.sum()).item())


@pytest.mark.parametrize(("n_layers", "labels"), [(1, NASTY), (5, ["a"] * 40)])
@pytest.mark.filterwarnings("error::UserWarning")
def test_the_figure_is_drawn_for_any_number_of_layers_and_tokens(n_layers, labels):
    for leaves in (True, False):
        content = draw(made_up(labels, n_layers=n_layers, leaves=leaves))
        assert content.startswith(b"\x89PNG")
        assert content == draw(made_up(labels, n_layers=n_layers, leaves=leaves))


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus, cache_dir):
    """Folders of a tiny selective and a tiny standard run."""
    register_resolvers()
    root = tmp_path_factory.mktemp("map-runs")
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for kind in ("selective", "standard"):
            options = [*TINY, f"data.root={corpus}", f"cache_dir={cache_dir}", f"runs_root={root}", "sample=null"]
            options += [f"run_dir={root / kind}", f"attention={kind}", "trainer.max_steps=3"]
            train(hydra.compose("train", options))
    return {kind: root / kind for kind in ("selective", "standard")}


@pytest.fixture
def command(runs, cache_dir):
    def command(*overrides, text="the water would make people.", run="selective"):
        options = [f"checkpoint={runs[run]}", f"cache_dir={cache_dir}", "trainer=cpu", "suite=maps"]
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            cfg = hydra.compose("evaluate", [*options, *overrides])
        cfg.text = text
        return evaluate(cfg)

    return command


def test_a_page_and_a_figure_are_written_and_not_replaced_unless_asked(command, tmp_path):
    html = tmp_path / "map.html"
    found = command(f"output={html}", "budgets=4")
    assert found.facts["budgets"] == [4, 4]
    data = json.loads(Elements(html.read_text()).data)
    assert "".join(data["labels"][1:]) == "the water would make people."
    assert data["facts"]["checkpoint"] == "selective/last.ckpt"
    assert html.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    before = html.read_bytes()
    with pytest.raises(UserError, match=r"map\.html, .*map\.png: exists; expected another output=.*overwrite=true"):
        command(f"output={html}", text="other")
    assert html.read_bytes() == before
    command(f"output={html}", "overwrite=true", text="other")
    assert html.read_bytes() != before


def test_without_a_name_the_files_lie_beside_the_checkpoint_named_by_the_text(command, runs):
    command(text="go on / there")
    command("budgets=3", text="go on / there")
    assert {path.name for path in runs["selective"].glob("maps-*.html")} == {
        "maps-last+text-go-on-there.html", "maps-last+budgets-3+text-go-on-there.html",
    }  # fmt: skip


def test_a_text_may_come_from_standard_input(command, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("go\nthere é".encode())))
    found = command(f"output={tmp_path / 'map.html'}", text="-")
    assert "".join(found.labels[1:]).startswith("go\nthere ")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(UserError, match=r"standard input is not UTF-8 \(at byte 0\)"):
        command(f"output={tmp_path / 'other.html'}", text="-")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": None}, "text: not given; expected text="),
        ({"text": ""}, "text: is empty; expected"),
        ({"text": "word " * 40}, r"text: has \d+ tokens with <BOS>, and the model's context is 32; expected a shorter"),
        (
            {"run": "standard"},
            r"standard/last\.ckpt: is of StandardAttention, which masks nothing; expected a run",
        ),
    ],
)
def test_what_has_no_map_is_refused(command, runs, options, message):
    before = {path.name for run in runs.values() for path in run.iterdir()}
    with pytest.raises(UserError, match=message):
        command(**options)
    assert {path.name for run in runs.values() for path in run.iterdir()} == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("output=map.txt", "expected the name of an HTML file"),
        ("overwrite=maybe", "overwrite=maybe"),
        ("budgets=1", "budg"),
    ],
)
def test_bad_options_are_refused(command, override, message):
    with pytest.raises(UserError, match=message):
        command(override)
