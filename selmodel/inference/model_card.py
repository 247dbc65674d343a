"""The README.md of an exported model: how to use it, what it is, and under which protocol its figures were taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USE = """```python
import selmodel.huggingface  # of the package selmodel: makes transformers know the format
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
prompt = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40, do_sample=True)[0], skip_special_tokens=True))
```"""

LIMITS = """A base model, trained to continue text. It has had no instruction tuning and no safety tuning: what it
writes may be wrong, offensive, or copied from its corpus, and it should not be relied on for facts. Every text should
begin with `<BOS>`, which the tokenizer adds, since every sequence of training did."""


def model_card(name: str, record: Mapping[str, Any]) -> str:
    """The page for a folder called ``name``; ``record`` is what ``selmodel.inference.export.describe`` gives."""
    selective = record["architecture"]["attention"]["kind"] == "SelectiveAttention"
    kind = "selective attention" if selective else "standard attention"
    tags = ["selmodel", *(["selective-attention"] if selective else [])]
    header = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    header += ["tags:", *(f"- {tag}" for tag in tags)]
    if record["training"]["source"] == "C4Source":
        header += ["datasets:", "- allenai/c4", "language: en"]
    header += ["---", ""]
    intro = (
        f"A decoder-only language model with {kind}, {record['parameters']:,} parameters, trained for "
        f"{record['step']:,} steps of {record['training']['batch_size']:,} sequences, "
        f"{record['tokens']:,} tokens, by selmodel {record['environment'].get('selmodel', '')}."
    )
    if selective:
        intro += (
            " In selective attention a token lowers the attention that later tokens pay to earlier ones, without "
            "parameters of its own (arXiv 2410.02703)."
        )
    sizes = _flat(record["architecture"]) | {"weights": record["dtype"]}
    training = _flat(record["training"]) | _flat(record["tokenizer"], "tokenizer.")
    parts = [
        "\n".join(header) + f"# {name}", intro, "## Use", USE.format(name=name), *_budgets(record),
        "## Figures", _figures(record), "## Model", _table(sizes), "## Training", _table(training),
        "Made with:", _table(_flat(record["environment"])), "## Limits", LIMITS,
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def _budgets(record: Mapping[str, Any]) -> list[str]:
    kept = record["budgets"]
    if kept is None:
        return []
    return [
        "## Memory",
        f"`generate()` holds at most {kept['budgets']} keys in the layers, by the rule `{kept['rule']}`; "
        "`model.config.budgets = None` lets it hold all.",
    ]


def _figures(record: Mapping[str, Any]) -> str:
    validation, protocol = record["validation"], record["protocol"]
    if not validation:
        return (
            "None are recorded for this step. `python evaluate.py checkpoint=RUN/FILE.ckpt` takes them, and an export "
            "after that shows them here."
        )
    rows = {
        "loss, nats per token": f"{validation['loss']:.4f}",
        "perplexity": f"{validation['perplexity']:.2f}",
        "bits per byte": f"{validation['bits_per_byte']:.4f}" if validation.get("bytes") else "not counted",
        "over": ", ".join(f"{validation[unit]:,} {unit}" for unit in ("sequences", "tokens", "bytes")),
    }
    text = "Of the first sequences of the validation split, each begun by `<BOS>`, with weights in float32"
    text += " and all keys attended to:\n\n" if record["budgets"] is None else ", without budgets:\n\n"
    text += _table(rows, ("figure", "value"))
    return text + ("\n\nProtocol:\n\n" + _table(_flat(protocol)) if protocol else "")


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def _table(rows: Mapping[str, Any], head: tuple[str, str] = ("", "")) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    for name, value in rows.items():
        shown = (
            f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10000 else str(value)
        )
        lines.append(f"| {name} | {shown.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)
