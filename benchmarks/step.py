"""The whole training step: standard attention against selective.

    python benchmarks/step.py [--context N] [--batch N] [--layers N] [--heads N] [--checkpoint RUN/last.ckpt]

A step is what training does with a batch: gradients to zero, forward, loss, backward, clipping, AdamW; on a GPU in
bfloat16 autocast. The models have the same parameters and take turns in one process; medians of the step's time as a
ratio to standard attention, then milliseconds and tokens per second, and the memory a step takes at its highest beyond
model and optimizer. An untrained model has few dead keys; with --checkpoint all models have the weights of a trained
selective one and read its validation text.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measuring import MIB, Skipped, guarded, in_turns, machine, peak_bytes, progress, usable_device
from torch import Tensor
from trained import read_trained

from selmodel.attention import SelectiveAttention, StandardAttention
from selmodel.attention.kernels import KERNELS, triton_op
from selmodel.errors import UserError
from selmodel.model import Transformer
from selmodel.training.losses import loss_sum
from selmodel.training.optim import AdamW

# Eager leaves no key out.
KINDS: dict[str, tuple[type, dict[str, str]]] = {"standard": (StandardAttention, {})} | {
    name + ("-live" if live_keys == "auto" else ""): (SelectiveAttention, {"kernel": name, "live_keys": live_keys})
    for name in KERNELS
    for live_keys in ("off", "auto")
    if (name, live_keys) != ("eager", "auto")
}
# So small a rate that a trained model stays what it is while it is measured.
OPTIM = AdamW(lr=1e-9, schedule="constant", schedule_steps=1, warmup_steps=0)
# Options that the checkpoint decides where there is one, with what they are where there is none.
SIZES = {"context": 512, "layers": 4, "heads": 8, "vocab_size": 8192}


@dataclass
class Setup:
    """What all models have in common."""

    sizes: dict[str, Any]  # options of Transformer
    tokens: Tensor  # [b, n + 1], int64
    device: str
    state: dict[str, Tensor] | None = None  # weights; None: those of seed 0
    qk_norm: bool = False
    selection: dict[str, int] = field(default_factory=dict)  # options of SelectiveAttention alone
    optim: AdamW = OPTIM

    def model(self, name: str) -> Transformer:
        kind, options = KINDS[name]
        options = options | {"qk_norm": self.qk_norm} | (self.selection if kind is SelectiveAttention else {})
        model = Transformer(attention=functools.partial(kind, **options), **self.sizes)
        if self.state is None:
            model.init_weights(0)
        else:
            model.load_state_dict(self.state)
        return model.to(self.device)

    def step(self, name: str) -> Callable[[], None]:
        """A model, its optimizer and the batch, as the step to be measured."""
        model, tokens = self.model(name), self.tokens.to(self.device)
        optimizer = self.optim.build(model)
        mixed = torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.device.startswith("cuda"))

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with mixed:
                loss = loss_sum(model(tokens[:, :-1]).logits, tokens[:, 1:]) / tokens[:, 1:].numel()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.optim.gradient_clip or math.inf)
            optimizer.step()

        step.model, step.optimizer = model, optimizer
        return step


def prepared(name: str, setup: Setup) -> Callable[[], None]:
    """For the measurement of memory: a step after a first one, which makes the optimizer's state."""
    step = setup.step(name)
    step()
    step.optimizer.zero_grad(set_to_none=True)  # gradients belong to the step
    return step


def trained_setup(path: Path, data_root: str | None, batch: int, device: str) -> tuple[Setup, list[float]]:
    """Sizes, weights and text of a selective checkpoint; and the share of live causal pairs, layer by layer."""
    model, tokens = read_trained(path, data_root, batch)
    sizes = {name: value for name, value in model.options().items() if value is not None}
    attention = sizes.pop("attention")
    if "live_keys" in attention:
        raise UserError(
            f"--checkpoint {path}: it was trained with attention.live_keys={attention['live_keys']}, which is another "
            "function than the kernels here compute; take a run with live_keys auto or off"
        )
    layer = model.blocks[0].attention
    setup = Setup(
        sizes, tokens, device, model.state_dict(), layer.qk_norm, selection={"selection_head": layer.selection_head}
    )
    return setup, setup.model("blockwise-live").selection_statistics(tokens[:, :-1].to(device)).live_share.tolist()


def random_setup(options: argparse.Namespace) -> Setup:
    """A model of the sizes asked for with its initial weights, and random tokens."""
    sizes = {
        "vocab_size": options.vocab_size,
        "n_layers": options.layers,
        "n_heads": options.heads,
        "d_model": 64 * options.heads,
        "context_length": options.context,
    }
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(options.vocab_size, (options.batch, options.context + 1), generator=generator)
    return Setup(sizes, tokens, str(options.device))


def parse(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, help=f"default: {SIZES['context']}")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, help=f"default: {SIZES['layers']}")
    parser.add_argument(
        "--heads", type=int, help=f"of 64 features; d_model is 64 times as many; default: {SIZES['heads']}"
    )
    parser.add_argument("--vocab-size", type=int, help=f"default: {SIZES['vocab_size']}")
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="NAME", help=", ".join(KINDS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; medians are printed")
    parser.add_argument("--patience", type=float, default=60, help="skip what takes more seconds for one step")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--checkpoint", type=Path, help="its sizes and weights, and its own validation text")
    parser.add_argument("--data-root", help="with --checkpoint: where its text is now")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args(arguments)
    for name, least in {
        **dict.fromkeys(("batch", "layers", "heads", "rounds"), 1),
        "context": 2,
        "vocab_size": 2,
    }.items():
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: expected {least} or more")
    if not options.patience > 0:
        parser.error(f"--patience {options.patience}: expected a number of seconds above 0")
    for name, default in SIZES.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif options.checkpoint:
            parser.error(f"--{name.replace('_', '-')} with --checkpoint: the checkpoint decides it; leave it out")
    if options.data_root and not options.checkpoint:
        parser.error(f"--data-root {options.data_root}: only read with --checkpoint; give that too")
    if options.json and (options.json.is_dir() or not options.json.resolve().parent.is_dir()):
        parser.error(f"--json {options.json}: expected a file's name in a folder that exists")
    try:
        options.device = usable_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    return parser, options


def main(arguments: list[str] | None = None) -> None:
    parser, options = parse(arguments)
    device = options.device
    missing = triton_op.availability(device.type)
    names = list(options.only or (name for name in KINDS if not (missing and name.startswith("triton"))))
    names = list(dict.fromkeys(["standard", *names]))
    try:
        if options.checkpoint:
            setup, shares = trained_setup(options.checkpoint, options.data_root, options.batch, str(device))
            source = f"weights and text of {options.checkpoint}"
        else:
            setup, shares, source = random_setup(options), None, "initial weights, random tokens"
        steps = {name: setup.step(name) for name in names}
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    b, n = setup.tokens.shape[0], setup.tokens.shape[1] - 1
    sizes = f"{setup.sizes['n_layers']} layers, {setup.sizes['n_heads']} heads, d_model {setup.sizes['d_model']}"
    print(machine(device) + (f"; no triton: {missing}" if missing and not options.only else ""))
    print(f"{source}; {sizes}, {b} sequences of {n} tokens; medians of {options.rounds} rounds in turns")
    if shares:
        print(f"live pairs by layer: {', '.join(f'{share:.0%}' for share in shares)}")

    calls = {name: functools.partial(guarded, step) for name, step in steps.items()}
    took = in_turns(calls, options.rounds, options.patience, device, progress)
    del steps, calls
    figures: dict[str, dict] = {name: {"seconds": seconds} for name, seconds in took.items()}
    for name, seconds in took.items():
        progress(f"memory: {name}")
        figures[name]["peak_bytes"] = Skipped("not measured")
        if not (options.no_memory or isinstance(seconds, Skipped)):
            try:
                figures[name]["peak_bytes"] = peak_bytes(prepared, name, setup, device=device)
            except Skipped as reason:
                figures[name]["peak_bytes"] = reason
    progress("")
    print(*table(figures, b * n), sep="\n", flush=True)
    if options.json:
        report = {"machine": machine(device), "setup": f"{source}; {sizes}", "batch": b, "context": n}
        report |= {"rounds": options.rounds, "live_shares": shares, "steps": figures}
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


def table(figures: dict[str, dict], tokens: int) -> list[str]:
    """Lines for a terminal, for steps of so many tokens: ratios to standard attention first."""
    base = figures["standard"]["seconds"]
    lines = ["", f"{'':<16}{'x standard':>11}{'ms':>10}{'tokens/s':>11}{'MiB':>9}"]
    for name, result in figures.items():
        seconds, peak = result["seconds"], result["peak_bytes"]
        if isinstance(seconds, Skipped):
            lines.append(f"{name:<16}{'-':>11}  {seconds}")
            continue
        ratio = "-" if isinstance(base, Skipped) else f"{seconds / base:.2f}"
        memory = "-" if isinstance(peak, Skipped) else f"{peak / MIB:.0f}"
        lines.append(f"{name:<16}{ratio:>11}{seconds * 1e3:>10.0f}{tokens / seconds:>11,.0f}{memory:>9}")
    return lines


if __name__ == "__main__":
    main()
