"""Tables as CSV and Markdown, the same bytes for the same rows."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from selmodel.report.runs import Run

# Columns of the tidy table, a row for each run; settings that vary in it follow.
COLUMNS = (
    "run", "attention", "n_heads", "n_layers", "d_model", "head_dim", "context_length", "memory_loss_eps", "seed",
    "tokens", "loss", "perplexity", "bits_per_byte", "parameters", "attention_parameters", "validation_tokens",
    "tokenizer_hash", "source", "precision", "git_commit",
)  # fmt: skip


def row(run: Run) -> dict[str, Any]:
    """A run as a row of the tidy table."""
    settings = run.settings
    return {
        "run": run.name,
        "attention": run.attention,
        **{
            name: settings[f"model.{name}"] for name in ("n_heads", "n_layers", "d_model", "head_dim", "context_length")
        },
        "memory_loss_eps": settings["attention.memory_loss.eps"],
        "seed": run.seed,
        "tokens": run.tokens,
        "loss": run.loss,
        "perplexity": run.perplexity,
        "bits_per_byte": run.bits_per_byte,
        "parameters": run.parameters["total"],
        "attention_parameters": run.parameters["attention"],
        "validation_tokens": settings.get("protocol.validation_tokens"),
        "tokenizer_hash": settings["protocol.tokenizer_hash"][:16],
        "source": settings["protocol.source"],
        "precision": settings["protocol.precision"],
        "git_commit": run.git_commit,
    }


def to_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> bytes:
    """``rows`` as CSV; floats so that reading them gives the same number."""
    columns = list(columns or dict.fromkeys(key for one in rows for key in one))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _plain(value) for key, value in one.items()} for one in rows)
    return text.getvalue().encode()


def to_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """``rows`` of texts as a Markdown table; numbers stand to the right."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for one in rows for key in one))
    numeric = [all(_is_number(one.get(key, "")) for one in rows) for key in columns]
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "|".join("---:" if right else "---" for right in numeric) + "|",
    ]
    lines += ["| " + " | ".join(str(one.get(key, "")) for key in columns) + " |" for one in rows]
    return "\n".join(lines) + "\n"


def to_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """``rows`` of texts for a terminal, in columns."""
    if not rows:
        return []
    columns = list(dict.fromkeys(key for one in rows for key in one))
    texts = [columns, *([str(one.get(key, "")) for key in columns] for one in rows)]
    widths = [max(len(line[i]) for line in texts) for i in range(len(columns))]
    right = [all(_is_number(one.get(key, "")) for one in rows) for key in columns]
    return [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in texts
    ]


def spread(values: Iterable[float], digits: int) -> str:
    """Mean of ``values``, with half their range where there are several: ``3.142 ±0.012``."""
    values = list(values)
    mean = sum(values) / len(values)
    text = f"{mean:,.{digits}f}"
    return text if len(values) == 1 else f"{text} ±{(max(values) - min(values)) / 2:.{digits}f}"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    return "" if value is None else value


def _is_number(value: object) -> bool:
    text = str(value).split(" ±")[0].replace(",", "").strip("<>x ")
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True
