"""docs/RESULTS.md from committed tables: ``python -m selmodel.report.results [TABLES] [PAGE]``.

TABLES (docs/results) holds the CSV files that reports have written, copied there; PAGE (docs/RESULTS.md) is made from
them and from nothing else, so the same tables give the same bytes.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from selmodel.report.equivalent import equivalent_range
from selmodel.report.tables import spread, to_markdown

Row = dict[str, str]
# What tells runs apart, seeds apart.
AXES = ("n_layers", "d_model", "n_heads", "head_dim", "context_length", "memory_loss_eps")


def read_table(folder: Path, name: str) -> list[Row]:
    """Rows of ``folder/name.csv``; none where it is not there."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def page(folder: Path) -> str:
    """The page on the tables in ``folder``."""
    parts = [
        "# Results",
        "Made by `python -m selmodel.report.results` from the tables in [results](results), which "
        "`python evaluate.py report=NAME sweep=DIR` has written. Do not edit.",
    ]
    for number, (claim, answer) in enumerate(CLAIMS, start=1):
        parts += [f"## {number}. {claim}", *answer(folder)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def lower_perplexity(folder: Path) -> list[str]:
    """Claim 1: pairs of standard and selective runs that differ in nothing else."""
    parts = []
    for name, axis, words in (
        ("perplexity_vs_heads", "n_heads", "heads"),
        ("context_size", "context_length", "context"),
        ("model_size", "n_layers", "layers"),
    ):
        rows = read_table(folder, name)
        pairs = _pairs(rows)
        if not pairs:
            parts.append(f"By {words}: not run.")
            continue
        table = [
            {
                words: f"{int(key[AXES.index(axis)]):,}",
                "standard perplexity": spread(map(_perplexity, standard), 2),
                "selective perplexity": spread(map(_perplexity, selective), 2),
                "difference, nats": f"{_mean(standard) - _mean(selective):+.4f}",
                "seeds": f"{len(standard)}, {len(selective)}",
            }
            for key, standard, selective in pairs
        ]
        lower = sum(_mean(selective) < _mean(standard) for _, standard, selective in pairs)
        clear = sum(max(selective) < min(standard) for _, standard, selective in pairs)
        parts += [
            f"By {words}: selective is lower in {lower} of {len(pairs)} comparisons, and its worst seed below "
            f"standard's best in {clear}.",
            to_markdown(table),
            _conditions(rows),
            *_figure(folder, name),
        ]
    return parts


def equivalent(folder: Path) -> list[str]:
    """Claim 2: the standard heads that a number of selective heads is worth."""
    rows = read_table(folder, "perplexity_vs_heads")
    if not _pairs(rows):
        return ["Not run."]
    table, curves = [], {}
    for depth in sorted({int(row["n_layers"]) for row in rows}):
        losses: dict[str, dict[int, list[float]]] = {"standard": {}, "selective": {}}
        for row in rows:
            if int(row["n_layers"]) == depth and row["attention"] in losses:
                losses[row["attention"]].setdefault(int(row["n_heads"]), []).append(float(row["loss"]))
        if not losses["standard"]:
            continue
        curves[depth] = losses["standard"]
        for heads, values in sorted(losses["selective"].items()):
            mean, least, most = equivalent_range(losses["standard"], values)
            inside = 0 < mean.heads < math.inf
            table.append(
                {
                    "layers": depth,
                    "selective heads": heads,
                    "equivalent standard heads": str(mean),
                    "range over seeds": f"{least} to {most}",
                    "ratio": f"{mean.heads / heads:.2f}" if inside else "-",
                }
            )
    flat = [
        f"With {depth} layers the standard loss changes by {_range_of_means(losses):.3f} nats over the heads measured, "
        f"and by up to {_largest_spread(losses):.3f} between seeds."
        for depth, losses in curves.items()
    ]
    return [
        "The paper: about twice the heads, and so twice the parameters of attention. Here, by interpolation of the "
        "loss in the logarithm of heads, nothing extrapolated; the range takes the seeds at their most unlike.",
        to_markdown(table),
        *flat,
    ]


def _range_of_means(losses: dict[int, list[float]]) -> float:
    means = [_mean(values) for values in losses.values()]
    return max(means) - min(means)


def _largest_spread(losses: dict[int, list[float]]) -> float:
    return max(max(values) - min(values) for values in losses.values())


def memory_factors(folder: Path) -> list[str]:
    """Claim 3: how many times fewer keys at the standard model's perplexity."""
    rows = read_table(folder, "memory")
    if not rows:
        return ["Not run."]
    table = [
        {
            "context": row["context_length"],
            "positions": row["positions"],
            "memory loss": row["memory_loss_eps"],
            "target": "own perplexity" + row["target"].removeprefix("own")
            if row["target"].startswith("own")
            else "standard's",
            "keys by layer": row["budgets"],
            "factor": f"{float(row['memory_factor']):.1f}",
            "perplexity": f"{float(row['perplexity']):.2f}",
            "of the target": _two_digits(row["target_perplexity"]),
            "unpruned": _two_digits(row["unpruned_perplexity"]),
        }
        for row in rows
    ]
    return [
        "The paper: 16, 25 and 47 times at contexts 512, 1,024 and 2,048. Here, perplexities on the part of the "
        "validation set that the search did not see:",
        to_markdown(table),
    ]


def hellaswag(folder: Path) -> list[str]:
    """Claim 4."""
    rows = read_table(folder, "hellaswag")
    if not rows:
        return ["Not run at a scale that could tell: models this small answer at chance."]
    best = max(float(row["acc_norm"]) for row in rows)
    told = any(float(row["acc_norm"]) - float(row["chance"]) > 3 * float(row["stderr"]) for row in rows)
    untold = (
        f" The best, {best:.4f}, is within three standard errors of chance: models this small answer by chance, and "
        "the claim cannot be told at this scale."
    )
    return [
        "The whole validation set by lm-eval, no examples before a question. acc_norm: the ending that is likeliest "
        "per character is the right one; stderr is its standard error." + ("" if told else untold),
        to_markdown(rows),
    ]


def variable_assignment(folder: Path) -> list[str]:
    """Claim 5: accuracy in and beyond the lengths trained on."""
    rows = read_table(folder, "task_accuracy")
    if not rows:
        return ["Not run."]
    table = []
    for length in sorted({int(row["length"]) for row in rows}):
        here = [row for row in rows if int(row["length"]) == length]
        beyond = length > int(here[0]["trained_length"])
        one: Row = {"assignments": str(length), "": "beyond training" if beyond else ""}
        for kind in ("standard", "selective"):
            values = [float(row["accuracy"]) for row in here if row["attention"] == kind]
            one[kind] = spread(values, 3) if values else "-"
        table.append(one)
    seeds = len({row["seed"] for row in rows})
    return [
        f"Share of answers that are right, {seeds} seed{'s' if seeds > 1 else ''} (± half the range).",
        to_markdown(table),
        *_figure(folder, "task_accuracy"),
    ]


CLAIMS: tuple[tuple[str, Callable[[Path], list[str]]], ...] = (
    ("At equal size, selective attention has lower perplexity", lower_perplexity),
    ("Selective attention with h heads matches standard attention with about 2h", equivalent),
    ("At the standard model's perplexity, budgets shrink the attention buffer", memory_factors),
    ("HellaSwag accuracy is higher", hellaswag),
    ("Variable assignment is solved, also at lengths beyond training", variable_assignment),
)


def _pairs(rows: Iterable[Row]) -> list[tuple[tuple[str, ...], list[float], list[float]]]:
    """(axes, standard losses, selective losses) wherever both kinds were run, by the axes' numbers."""
    groups: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for row in rows:
        key = tuple(row[name] for name in AXES)
        groups.setdefault(key, {}).setdefault(row["attention"], []).append(float(row["loss"]))
    both = [
        (key, kinds["standard"], kinds["selective"])
        for key, kinds in groups.items()
        if "standard" in kinds and "selective" in kinds
    ]
    return sorted(both, key=lambda item: [float(value) for value in item[0]])


def _conditions(rows: list[Row]) -> str:
    first = rows[0]
    tokens = ", ".join(f"{int(value):,}" for value in sorted({row["tokens"] for row in rows}, key=int))
    commits = ", ".join(sorted({row["git_commit"][:10] for row in rows}))
    return (
        f"{tokens} tokens a run, {int(first['validation_tokens']):,} for validation, corpus {first['source'][:8]}, "
        f"tokenizer {first['tokenizer_hash'][:8]}, {first['precision']}; ± half the range over seeds; program "
        f"{commits}."
    )


def _figure(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.svg"
    return [f"![{name.replace('_', ' ')}]({folder.name}/{path.name})"] if path.exists() else []


def _perplexity(loss: float) -> float:
    return math.exp(loss)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _two_digits(text: str) -> str:
    return f"{float(text):.2f}" if text else "-"


def main(arguments: list[str]) -> None:
    """Write the page; the arguments are the folder of tables and the page's path."""
    docs = Path(__file__).resolve().parents[2] / "docs"
    folder = Path(arguments[0]) if arguments else docs / "results"
    target = Path(arguments[1]) if len(arguments) > 1 else docs / "RESULTS.md"
    if not folder.is_dir():
        sys.exit(f"error: {folder}: no such folder; expected one with the CSV files of reports")
    target.write_text(page(folder), encoding="utf-8")
    print(f"written to {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
