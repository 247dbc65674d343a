"""``suite=analysis``: where the loss is, whether probabilities can be trusted, and which kinds of tokens are masked."""

from __future__ import annotations

import csv
import io
import logging
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from selmodel.attention.selection import accumulate
from selmodel.data.caching import write_atomically
from selmodel.evaluation.maps import recorded_scores, token_labels
from selmodel.evaluation.setup import output_path
from selmodel.evaluation.subject import choose_device
from selmodel.training.loading import load_run
from selmodel.training.losses import token_losses
from selmodel.training.summary import to_json

log = logging.getLogger(__name__)

SEQUENCES = 64  # of the validation set, unless data.validation_sequences is given
BATCH = 8  # sequences of one pass, unless data.validation_batch_size is given
BINS = 10  # of confidence
MASKED = 1.0  # a key with F above this counts as masked, as tau of the memory term in the paper
KINDS = (
    "end of a document", "white space", "punctuation", "number", "repeated piece of a word", "beginning of a word",
    "inside of a word", "other",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One figure of the table.

    Attributes:
        part: "loss by position", "calibration" or "masked".
        name: the positions, the range of confidence, or the kind of token.
        figure: what the value is: "loss", "accuracy", "confidence", "share" or "ece".
        layer: of a share; None: over all layers, or of no layer.
        value: the figure.
        n: how many targets, or pairs of a query and a key, it is over.
    """

    part: str
    name: str
    figure: str
    layer: int | None
    value: float
    n: int


def analysis(cfg: DictConfig) -> list[Row]:
    """Analyse ``cfg.checkpoint`` on the first sequences of its validation set; print the table, write JSON and CSV.

    Raises:
        UserError: for a run on a synthetic task, whose tokens are of no kind.
    """
    run = load_run(cfg.checkpoint)
    run.check_on_text("suite=analysis")
    overrides = {"validation_sequences": SEQUENCES, "validation_batch_size": BATCH}
    overrides |= {name: value for name, value in cfg.data.items() if value is not None}
    data = run.data(overrides, cache_dir=cfg.cache_dir)
    data.prepare_data()
    model = run.model.to(choose_device(cfg.trainer.accelerator)).eval()
    losses, hits = PositionLoss(model.context_length), Calibration()
    masked = MaskedByKind(model.n_layers) if model.blocks[0].attention.selection_head is not None else None
    for batch in data.val_dataloader():
        tokens = batch["tokens"].to(model.embedding.weight.device)
        documents = batch.get("document_ids")
        documents = None if documents is None else documents[:, :-1].to(tokens.device)
        with torch.inference_mode():
            if masked is None:
                logits = model.forward(tokens[:, :-1], documents).logits
            else:
                with recorded_scores(model) as scores:
                    logits = model.forward(tokens[:, :-1], documents).logits
                kinds = [token_kinds(token_labels(run.tokenizer, row.tolist()), row.tolist()) for row in tokens[:, :-1]]
                masked.update(scores, torch.tensor(np.array(kinds)))
            losses.update(token_losses(logits, tokens[:, 1:]))
            hits.update(logits, tokens[:, 1:])
    rows = [*losses.rows(), *hits.rows(), *(masked.rows() if masked else [])]
    output = output_path(cfg, run.path, "analysis").with_suffix(".json")
    results = {
        "checkpoint": run.path.name, "step": run.step, "protocol": data.protocol(), "environment": run.environment,
        "rows": [vars(row) for row in rows],
    }  # fmt: skip
    write_atomically(output, to_json(results))
    write_atomically(output.with_suffix(".csv"), to_csv(rows))
    log.info("%s, step %d, %d sequences of %d tokens", run.path, run.step, data.validation_set.n_sequences,
             model.context_length)  # fmt: skip
    for line in (*table(rows, model.n_layers), f"  written to {output} and {output.with_suffix('.csv').name}"):
        log.info(line)
    return rows


class PositionLoss:
    """Mean loss by position of the target, in ranges that double: 1, 2, 3-4, 5-8, ..."""

    def __init__(self, context_length: int) -> None:
        self.sums = np.zeros(context_length)
        self.count = 0

    def update(self, losses: Tensor) -> None:
        """Add losses [b, n] in nats."""
        self.sums[: losses.shape[1]] += losses.double().sum(0).cpu().numpy()
        self.count += len(losses)

    def rows(self) -> list[Row]:
        first, rows, n = 0, [], len(self.sums)
        while first < n:
            last = min(n, max(first + 1, 2 * first))
            name = str(first + 1) if last == first + 1 else f"{first + 1}-{last}"
            count = self.count * (last - first)
            rows.append(Row("loss by position", name, "loss", None, self.sums[first:last].sum() / count, count))
            first = last
        total = self.count * n
        return [*rows, Row("loss by position", "all", "loss", None, self.sums.sum() / total, total)]


class Calibration:
    """Of the likeliest token at each place: how probable the model says it is, and how often it is right.

    ECE, the expected calibration error (Naeini et al. 2015): the mean over all places of the distance between the two,
    in bins of equal width.
    """

    def __init__(self) -> None:
        self.counts, self.right, self.confidence = (np.zeros(BINS) for _ in range(3))

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add logits [b, n, vocabulary] and targets [b, n]."""
        probability, token = logits.float().softmax(-1).max(-1)
        probability, right = probability.double().flatten().cpu().numpy(), (token == targets).flatten().cpu().numpy()
        index = np.minimum((probability * BINS).astype(int), BINS - 1)
        self.counts += np.bincount(index, minlength=BINS)
        self.right += np.bincount(index, weights=right, minlength=BINS)
        self.confidence += np.bincount(index, weights=probability, minlength=BINS)

    def rows(self) -> list[Row]:
        rows = []
        for index in np.flatnonzero(self.counts):
            n = int(self.counts[index])
            name = f"{index / BINS:.1f}-{(index + 1) / BINS:.1f}"
            rows.append(Row("calibration", name, "confidence", None, self.confidence[index] / n, n))
            rows.append(Row("calibration", name, "accuracy", None, self.right[index] / n, n))
        n = int(self.counts.sum())
        rows.append(Row("calibration", "all", "confidence", None, self.confidence.sum() / n, n))
        rows.append(Row("calibration", "all", "accuracy", None, self.right.sum() / n, n))
        ece = np.abs(self.confidence - self.right).sum() / n
        return [*rows, Row("calibration", "all", "ece", None, float(ece), n)]


class MaskedByKind:
    """By kind of key: of the pairs of a key and a later query, the share with F above ``MASKED``.

    Counted are queries that could be masked from, two places after the key or later, and no ``<BOS>``.
    """

    def __init__(self, n_layers: int) -> None:
        self.masked = np.zeros((n_layers, len(KINDS)))
        self.pairs = np.zeros(len(KINDS))

    def update(self, scores: Sequence[Tensor], kinds: Tensor) -> None:
        """Add S [b, n, n] of each layer, and the kind of each token, [b, n] int64, -1 for <BOS>."""
        n = kinds.shape[1]
        later = (n - 2 - torch.arange(n)).clamp(min=0).expand_as(kinds)
        known = kinds >= 0
        self.pairs += np.bincount(kinds[known], weights=later[known], minlength=len(KINDS))
        allowed = torch.ones(n, n, dtype=torch.bool).tril(-2)
        for layer, S in enumerate(scores):
            masked = ((accumulate(S.cpu()) > MASKED) & allowed).sum(1)  # [b, n], over queries
            self.masked[layer] += np.bincount(kinds[known], weights=masked[known], minlength=len(KINDS))

    def rows(self) -> list[Row]:
        rows = []
        for kind, name in [*enumerate(KINDS), (slice(None), "all")]:
            pairs = int(np.sum(self.pairs[kind]))
            if not pairs:
                continue
            shares = self.masked[:, kind].reshape(len(self.masked), -1).sum(1) / pairs
            rows += [Row("masked", name, "share", layer, float(share), pairs) for layer, share in enumerate(shares)]
            rows.append(Row("masked", name, "share", None, float(shares.mean()), pairs))
        return rows


def token_kinds(labels: Sequence[str], ids: Sequence[int]) -> list[int]:
    """The kind of each token, an index into ``KINDS``; -1 for the first, which is ``<BOS>``.

    A piece of a word is repeated where the same token came before in the sequence. A word begins behind white space,
    which may be part of its first token, and at the beginning of a text.
    """
    kinds, seen, after_space = [-1], {ids[0]}, True
    for label, i in zip(labels[1:], ids[1:], strict=True):
        kinds.append(KINDS.index(_kind(label, i in seen, after_space)))
        seen.add(i)
        after_space = label[-1:].isspace() or label == "⟨EOS⟩"
    return kinds


def _kind(label: str, repeated: bool, after_space: bool) -> str:
    if label == "⟨EOS⟩":
        return "end of a document"
    text = label.strip()
    if not text:
        return "white space"
    if label[0] == "⟨":
        return "other"
    if all(unicodedata.category(letter)[0] in "PS" for letter in text):
        return "punctuation"
    if any(letter.isdigit() for letter in text) and not any(letter.isalpha() for letter in text):
        return "number"
    if not any(letter.isalpha() for letter in text):
        return "other"
    if repeated:
        return "repeated piece of a word"
    return "beginning of a word" if after_space or label[0].isspace() else "inside of a word"


def table(rows: Iterable[Row], n_layers: int) -> list[str]:
    """The rows for a person."""
    rows = list(rows)
    lines = ["", f"  {'target at position':<26} {'loss, nats':>10} {'targets':>12}"]
    lines += [f"  {row.name:<26} {row.value:>10.4f} {row.n:>12,}" for row in rows if row.part == "loss by position"]
    lines += ["", f"  {'probability of the likeliest':<29} {'mean':>7} {'right':>7} {'targets':>9}"]
    bins = [row for row in rows if row.part == "calibration"]
    right = {row.name: row.value for row in bins if row.figure == "accuracy"}
    for row in bins:
        if row.figure == "confidence":
            lines.append(f"  {row.name:<29} {row.value:>7.3f} {right[row.name]:>7.3f} {row.n:>9,}")
    lines += [f"  {'expected calibration error':<29} {row.value:>7.4f}" for row in bins if row.figure == "ece"]
    masked = [row for row in rows if row.part == "masked"]
    if masked:
        shown = range(n_layers) if n_layers <= 6 else ()
        head = "".join(f"{f'layer {layer}':>9}" for layer in shown)
        lines += ["", f"  {f'masked (F > {MASKED:g}) of':<26}{head}{'all':>9} {'pairs':>12}"]
        for name in dict.fromkeys(row.name for row in masked):
            shares = {row.layer: row for row in masked if row.name == name}
            cells = "".join(f"{shares[layer].value:>9.1%}" for layer in (*shown, None))
            lines.append(f"  {name:<26}{cells} {shares[None].n:>12,}")
    return [*lines, ""]


def to_csv(rows: Iterable[Row]) -> bytes:
    """The rows as CSV, numbers to the last bit."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["part", "name", "figure", "layer", "value", "n"])
    for row in rows:
        layer = "" if row.layer is None else row.layer
        writer.writerow([row.part, row.name, row.figure, layer, repr(float(row.value)), row.n])
    return text.getvalue().encode()
