"""Speed and memory of attention: standard, and selective by every kernel there is.

    python benchmarks/attention.py [--contexts N ...] [--only NAME ...] [--checkpoint RUN/last.ckpt] [--json FILE]

For every context length it prints, for the forward pass without gradient (the prefill of inference) and for forward and
backward together, the time as a ratio to standard attention, then milliseconds, then the memory that forward and
backward take beyond the inputs at their highest. Contenders take turns in one process; medians. The inputs are random,
or with --checkpoint the queries, keys and values of every layer of a trained selective model on its own validation
text, where the times are summed over layers and the memory is that of the layer with most live pairs.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from contenders import CONTENDERS, MEASURES, disagreement, forward_backward, quadratic_bytes, random_tensors
from measuring import MIB, Skipped, free_bytes, guarded, in_turns, machine, peak_bytes, progress, usable_device
from torch import Tensor
from trained import read_trained

from selmodel.attention.kernels import triton_op
from selmodel.attention.live import death_thresholds
from selmodel.attention.selection import selection_statistics
from selmodel.errors import UserError
from selmodel.model import Transformer

CONTEXTS = [256, 512, 1024, 2048, 4096, 8192]
HEADS, HEAD_DIM = 8, 64
SMALL = 160  # context of the calls that load libraries before memory is measured: more than a block of queries


@dataclass
class Layer:
    """What the attention of one layer gets."""

    q: Tensor  # [b, h, n, d]
    k: Tensor  # [b, h_kv, n, d]
    v: Tensor
    grad: Tensor  # of the output, [b, h, n, d]
    selection_head: int = 0

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.grad

    def beginning(self, n: int) -> Layer:
        """The first n positions. Attention is causal, so they are what the model gives for a text of n tokens."""
        shortened = (x.transpose(1, 2)[:, :n].contiguous().transpose(1, 2) for x in self.tensors)
        return Layer(*shortened, self.selection_head)

    @functools.cached_property
    def live_share(self) -> float:
        """Share of the causal pairs whose key is live under live_keys=auto."""
        thresholds = death_thresholds(self.q, self.k, self.v, "auto")
        return selection_statistics(self.q[:, 0], self.k[:, 0], thresholds=thresholds).live_share.item()


@torch.no_grad()
def model_layers(model: Transformer, tokens: Tensor, dtype: torch.dtype, device: torch.device) -> list[Layer]:
    """Of every layer of a selective model, for tokens [b, n]. The gradient of the output is random."""
    seen: list[Layer] = []

    def keep(attention, arguments: tuple) -> None:
        x, rotary = arguments[:2]
        q, k, v = attention.project(x, rotary)
        *_, grad = random_tensors(*q.shape[:2], 1, *q.shape[2:], q.dtype, q.device, seed=len(seen))
        seen.append(Layer(*(x.to(device, dtype) for x in (q, k, v, grad)), attention.selection_head))

    hooks = [block.attention.register_forward_pre_hook(keep) for block in model.blocks]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def prepared(name: str, tensors: tuple[Tensor, ...]) -> Callable[[], object]:
    """For the measurement of memory: forward and backward, after a small call that loads what there is to load."""
    q, k = tensors[:2]
    (b, h, _, d), h_kv = q.shape, k.shape[1]
    forward_backward(CONTENDERS[name], *random_tensors(b, h, h_kv, SMALL, d, q.dtype, q.device))
    return functools.partial(forward_backward, CONTENDERS[name], *tensors)


def measure(layers: list[Layer], names: list[str], options: argparse.Namespace) -> dict[str, dict]:
    """By contender: forward and forward_backward in seconds, peak_bytes, or in their place why there is none."""
    q = layers[0].q
    b, h, n, d = q.shape
    limit = options.memory_limit * 2**30 if options.memory_limit else free_bytes(q.device) / 2
    too_large = {
        name: Skipped(
            f"needs about {needed / 2**30:.3g} GiB for its {n} x {n} logits, more than the {limit / 2**30:.3g} GiB of "
            "--memory-limit"
        )
        for name in names
        if (needed := quadratic_bytes(name, b, h, n, q.dtype)) > limit
    }
    results: dict[str, dict] = {name: {} for name in names}
    for what in MEASURES:
        totals: dict[str, float | Skipped] = {name: too_large.get(name, 0.0) for name in names}
        for number, layer in enumerate(layers, 1):
            at = f"context {n}, {what.replace('_', '+')}, layer {number} of {len(layers)}"
            running = [name for name in names if not isinstance(totals[name], Skipped)]
            calls = {
                name: functools.partial(guarded, MEASURES[what], CONTENDERS[name], *layer.tensors) for name in running
            }
            took = in_turns(calls, options.rounds, options.patience, q.device, lambda x, at=at: progress(f"{at}: {x}"))
            for name, seconds in took.items():
                totals[name] = seconds if isinstance(seconds, Skipped) else totals[name] + seconds
        for name, total in totals.items():
            results[name][what] = total
    most_live = max(layers, key=lambda layer: layer.live_share)
    for name, result in results.items():
        progress(f"context {n}, memory: {name}")
        result["peak_bytes"] = _memory(name, most_live, result["forward_backward"], options)
    progress("")
    return results


def _memory(name: str, layer: Layer, time: float | Skipped, options: argparse.Namespace) -> int | Skipped:
    if isinstance(time, Skipped):
        return time
    if options.no_memory:
        return Skipped("--no-memory")
    try:
        return peak_bytes(prepared, name, layer.tensors, device=layer.q.device)
    except Skipped as reason:
        return reason


def table(title: str, results: dict[str, dict]) -> list[str]:
    """Lines for a terminal: ratios to standard attention first; below, why a figure is missing."""
    lines = [
        "",
        title,
        f"{'':<16}{'forward (prefill)':^22}{'forward+backward':^22}{'memory':>10}",
        f"{'':<16}{'x standard':>11}{'ms':>10} {'x standard':>11}{'ms':>10}{'MiB':>11}",
    ]
    notes: dict[str, list[str]] = {}
    for name, result in results.items():
        line = f"{name:<16}"
        for what in MEASURES:
            value, base = result[what], results["standard"][what]
            ratio = "-" if isinstance(value, Skipped) or isinstance(base, Skipped) else f"{value / base:.2f}"
            line += f"{ratio:>11}" + (f"{'-':>10} " if isinstance(value, Skipped) else f"{value * 1e3:>10.1f} ")
        peak = result["peak_bytes"]
        lines.append(line + (f"{'-':>10}" if isinstance(peak, Skipped) else f"{peak / MIB:>10.1f}"))
        for what, value in result.items():
            if isinstance(value, Skipped):
                notes.setdefault(f"{name}: {value}", []).append(what.replace("_", "+").replace("peak+bytes", "memory"))
    return lines + [
        f"  no {', '.join(missing)} of {note}" for note, missing in notes.items() if "--no-memory" not in note
    ]


def agreement(errors: dict[str, dict[str, float | Skipped]]) -> list[str]:
    """Lines that say whether the contenders compute the same function."""
    lines = ["relative error against the definition in float64, of the output / the gradients:"]
    for name, error in errors.items():
        reasons = dict.fromkeys(str(value) for value in error.values() if isinstance(value, Skipped))
        figures = " / ".join("-" if isinstance(value, Skipped) else f"{value:.0e}" for value in error.values())
        lines.append(f"  {name:<14} {figures}" + "".join(f"  ({reason})" for reason in reasons))
    return lines


def parse(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--contexts", type=int, nargs="+", metavar="N", help=f"default: {CONTEXTS}, or all of --checkpoint's"
    )
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, help=f"default: {HEADS}")
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, help=f"default: {HEAD_DIM}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; medians are printed")
    parser.add_argument("--patience", type=float, default=20, help="skip what takes more seconds for one call")
    parser.add_argument("--memory-limit", type=float, help="GiB that logits may take; default: half of what is free")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--checkpoint", type=Path, help="take q, k, v from this trained selective model")
    parser.add_argument("--data-root", help="with --checkpoint: where its text is now")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args(arguments)
    for name in ("batch", "heads", "kv_heads", "head_dim", "rounds", "patience", "memory_limit"):
        value = getattr(options, name)
        if value is not None and not value >= (1 if isinstance(value, int) else 1e-9):
            least = "1 or more" if isinstance(value, int) else "a number above 0"
            parser.error(f"--{name.replace('_', '-')} {value}: expected {least}")
    if options.contexts and min(options.contexts) < 1:
        parser.error(f"--contexts {min(options.contexts)}: expected numbers of tokens, 1 or more")
    for name in ("heads", "kv_heads", "head_dim"):
        if options.checkpoint and getattr(options, name) is not None:
            parser.error(f"--{name.replace('_', '-')} with --checkpoint: the checkpoint decides it; leave it out")
    if options.data_root and not options.checkpoint:
        parser.error(f"--data-root {options.data_root}: only read with --checkpoint; give that too")
    options.heads, options.head_dim = options.heads or HEADS, options.head_dim or HEAD_DIM
    options.kv_heads = options.kv_heads or options.heads
    if options.heads % options.kv_heads:
        parser.error(f"--kv-heads {options.kv_heads}: expected a divisor of --heads {options.heads}")
    if options.json and (options.json.is_dir() or not options.json.resolve().parent.is_dir()):
        parser.error(f"--json {options.json}: expected a file's name in a folder that exists")
    try:
        options.device = usable_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    return parser, options


def layers_by_context(options: argparse.Namespace) -> tuple[list[int], Callable[[int], list[Layer]]]:
    """The contexts to measure at, and a function that gives the layers at one of them. Raises UserError."""
    dtype, device = getattr(torch, options.dtype), options.device
    if options.checkpoint is None:

        def random(n: int) -> list[Layer]:
            shape = (options.batch, options.heads, options.kv_heads, n, options.head_dim)
            return [Layer(*random_tensors(*shape, dtype, device))]

        return options.contexts or CONTEXTS, random
    model, tokens = read_trained(options.checkpoint, options.data_root, options.batch)
    longest = tokens.shape[1] - 1
    contexts = options.contexts or [longest]
    if max(contexts) > longest:
        raise UserError(
            f"--contexts {max(contexts)} with --checkpoint {options.checkpoint}: it was trained with a context of "
            f"{longest}; take at most that"
        )
    if model.blocks[0].attention.selection_head != 0:
        raise UserError(f"--checkpoint {options.checkpoint}: its selection head is not 0, which x-transformers takes")
    layers = model_layers(model, tokens[:, :-1], dtype, device)
    return contexts, lambda n: [layer.beginning(n) for layer in layers]


def main(arguments: list[str] | None = None) -> None:
    parser, options = parse(arguments)
    try:
        contexts, layers_at = layers_by_context(options)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    names = list(dict.fromkeys(["standard", *(options.only or CONTENDERS)]))
    missing = triton_op.availability(options.device.type)
    if missing and not options.only:
        names = [name for name in names if not name.startswith("triton")]

    print(machine(options.device))
    title = f"{options.dtype}, medians of {options.rounds} rounds in turns"
    print(title + (f"; no triton: {missing}" if missing else ""))
    errors = {}
    for name in names:
        if name != "standard":
            progress(f"comparing {name} with the definition")
            errors[name] = disagreement(name, getattr(torch, options.dtype), options.device)
    progress("")
    print(*agreement(errors), sep="\n", flush=True)
    report = {
        "machine": machine(options.device),
        "dtype": options.dtype,
        "rounds": options.rounds,
        "inputs": str(options.checkpoint) if options.checkpoint else "random",
        "relative_errors": errors,
        "results": [],
    }
    for n in contexts:
        layers = layers_at(n)
        b, h, _, d = layers[0].q.shape
        shares = [layer.live_share for layer in layers]
        live = f"live pairs {', '.join(f'{share:.0%}' for share in shares)}"
        source = f"{len(layers)} layers of {options.checkpoint}, summed; " if options.checkpoint else "random inputs; "
        results = measure(layers, names, options)
        print(*table(f"context {n}, batch {b}, {h} heads of {d}; {source}{live}", results), sep="\n", flush=True)
        shape = {"batch": b, "heads": h, "kv_heads": layers[0].k.shape[1], "context": n, "head_dim": d}
        report["results"].append({**shape, "live_shares": shares, "contenders": results})
        if options.json:
            options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
