"""Reading a prompt and decoding after it: standard attention against selective, whole and under budgets.

    python benchmarks/decode.py [--contexts 512 1024 2048 4096] [--factors 16 25 47 94] [--rules oldest h2o tova]
    python benchmarks/decode.py --checkpoint RUN/last.ckpt [--budgets FILE.json]

At each context n a prompt of n - T tokens is read in one pass (prefill: the cache empty, logits of the last position
alone), then T tokens are decoded one by one (--steps), up to the full context. So decoding is timed where it costs
most, and pruned caches are full. Models have the same weights and take turns in one process; medians. "x std" is time
over time for prefill, and speed over speed for decoding: there more is better. Cache bytes are what the caches say,
and "resident" what a fresh process grows by when it makes and fills one.

"promised" is n * layers / (sum of the budgets). A layer allocates K + 1 slots (one for the key that a query brings),
each with F and age beside key and value, so the bytes shrink a little less; "expected" has that in it.

An untrained model votes at random, and its budgets cost what a trained one's cost: nothing in a step depends on the
votes but which key leaves.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measuring import MIB, Skipped, guarded, in_turns, machine, peak_bytes, progress, usable_device
from torch import Tensor
from trained import read_trained

from selmodel.attention import SelectiveAttention, StandardAttention
from selmodel.attention.cache import KVCache
from selmodel.attention.pruning import LEAST_BUDGET, RULES
from selmodel.budgets import memory_factor, read_budgets
from selmodel.errors import UserError
from selmodel.model import Transformer

# The paper's memory factors at 512, 1,024 and 2,048 for models of 100M parameters, and one twice as large at 4,096.
FACTORS = {512: 16.0, 1024: 25.0, 2048: 47.0, 4096: 94.0}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = {"layers": 4, "heads": 8, "vocab_size": 8192}


@dataclass
class Contender:
    """A way to decode: a kind of attention, and which keys it may hold.

    seconds: of prefill and of decoding, by round, the warm-up first.
    """

    kind: type
    budgets: list[int] | None = None
    rule: str | None = None
    seconds: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Setup:
    """What all contenders at one context have in common."""

    sizes: dict[str, Any]  # options of Transformer
    tokens: Tensor  # [b, n] int64
    steps: int
    device: str
    dtype: torch.dtype
    state: dict[str, Tensor] | None = None  # weights; None: those of seed 0
    qk_norm: bool = False
    selection: dict[str, int] = field(default_factory=dict)  # options of SelectiveAttention alone

    @property
    def context(self) -> int:
        return self.tokens.shape[1]

    def model(self, contender: Contender) -> Transformer:
        options = {"qk_norm": self.qk_norm} | (self.selection if contender.kind is SelectiveAttention else {})
        model = Transformer(attention=functools.partial(contender.kind, **options), **self.sizes)
        if self.state is None:
            model.init_weights(0)
        else:
            model.load_state_dict(self.state)
        return model.to(self.device, self.dtype).eval()

    def cache(self, model: Transformer, contender: Contender) -> KVCache:
        return KVCache(model, len(self.tokens), contender.budgets, rule=contender.rule, context_length=self.context)


class Decoding:
    """A contender's model and cache; called, it reads the prompt, decodes, and notes the seconds of both."""

    def __init__(self, setup: Setup, contender: Contender) -> None:
        self.setup, self.contender = setup, contender
        self.model = setup.model(contender)
        self.cache = setup.cache(self.model, contender)
        self.tokens = setup.tokens.to(setup.device)

    def _now(self) -> float:
        if self.setup.device.startswith("cuda"):
            torch.cuda.synchronize(self.setup.device)
        return time.perf_counter()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The logits [b, vocabulary] after the last token."""
        first = self.setup.context - self.setup.steps
        self.cache.reset()
        start = self._now()
        self.model.forward(self.tokens[:, :first], cache=self.cache, last_only=True)
        read = self._now()
        for position in range(first, self.setup.context):
            logits = self.model.forward(self.tokens[:, position : position + 1], cache=self.cache).logits
        self.contender.seconds.append((read - start, self._now() - read))
        return logits[:, -1]


def filled_cache(setup: Setup, contender: Contender):
    """For the measurement of memory: makes a cache and writes to all of it."""
    model = setup.model(contender)
    small = torch.zeros(1 << 20)
    small.fill_(1.0)

    def fill() -> KVCache:
        cache = setup.cache(model, contender)
        for layer in cache.layers:
            for tensor in layer.tensors:
                tensor.fill_(0)
        return cache

    return fill


def expected_bytes(setup: Setup, contender: Contender) -> int:
    """Bytes that a cache has to hold: K + 1 slots of key and value in each layer, F, ages and sums where needed."""
    sizes = setup.sizes
    heads = sizes.get("n_kv_heads") or sizes["n_heads"]
    slot = 2 * heads * sizes.get("head_dim", 64) * setup.dtype.itemsize
    slot += 4 * (contender.kind is SelectiveAttention)
    slot += 4 * (contender.budgets is not None)
    slot += 4 * (contender.rule == "h2o")
    budgets = contender.budgets or [setup.context] * sizes["n_layers"]
    constant = 8 + 4  # the number of the free slot, and a zero
    return len(setup.tokens) * sum(slot * (min(budget, setup.context) + 1) + constant for budget in budgets)


def contenders(budgets: list[int], rules: list[str], default_rule: str | None = None) -> dict[str, Contender]:
    """Those of one context; standard, what others are a ratio to, first."""
    chosen = {
        "standard": Contender(StandardAttention),
        "selective": Contender(SelectiveAttention),
        "selective, budgets": Contender(SelectiveAttention, budgets, default_rule or "selective"),
    }
    return chosen | {f"standard, {rule}": Contender(StandardAttention, budgets, rule) for rule in rules}


def measure(setup: Setup, chosen: dict[str, Contender], rounds: int, patience: float, memory: bool) -> dict[str, dict]:
    """Medians of each contender: prefill_seconds, decode_seconds (of all steps), cache_bytes, resident_bytes."""
    device = torch.device(setup.device)
    runs = {name: Decoding(setup, contender) for name, contender in chosen.items()}
    sizes = {name: run.cache.nbytes for name, run in runs.items()}
    calls = {name: functools.partial(guarded, run) for name, run in runs.items()}
    took = in_turns(calls, rounds, patience, device, lambda text: progress(f"context {setup.context}: {text}"))
    del runs, calls
    figures: dict[str, dict] = {}
    for name, contender in chosen.items():
        if isinstance(took[name], Skipped):
            figures[name] = {"skipped": took[name]}
            continue
        prefill, decode = zip(*contender.seconds[-rounds:], strict=True)
        figures[name] = {
            "prefill_seconds": statistics.median(prefill),
            "decode_seconds": statistics.median(decode),
            "cache_bytes": sizes[name],
            "expected_bytes": expected_bytes(setup, contender),
            "resident_bytes": None,
            "budgets": contender.budgets,
            "rule": contender.rule,
            "promised_factor": memory_factor(contender.budgets, setup.context, setup.sizes["n_layers"]),
        }
        if memory:
            progress(f"context {setup.context}: memory of {name}")
            try:
                figures[name]["resident_bytes"] = peak_bytes(filled_cache, setup, contender, device=device)
            except Skipped as reason:
                figures[name]["resident_bytes"] = reason
    progress("")
    return figures


def table(figures: dict[str, dict], setup: Setup) -> list[str]:
    """Lines for a terminal."""
    prompt, b = setup.context - setup.steps, len(setup.tokens)
    lines = [
        "",
        f"context {setup.context:,}: a prompt of {prompt:,} tokens, then {setup.steps} decoded, {b} at a time",
        f"{'':<20}{'prefill':>8}{'':>10}{'':>11}{'decode':>9}{'':>10}{'cache':>11}{'':>10}{'fewer':>7}{'':>10}{'':>10}",
        f"{'':<20}{'x std':>8}{'ms':>10}{'tokens/s':>11}{'x std':>9}{'tokens/s':>10}{'MiB':>11}{'resident':>10}"
        f"{'bytes':>7}{'expected':>10}{'promised':>10}",
    ]
    base = figures["standard"]
    for name, one in figures.items():
        if "skipped" in one:
            lines.append(f"{name:<20}  {one['skipped']}")
            continue
        known = "skipped" not in base
        prefill, decode = one["prefill_seconds"], one["decode_seconds"]
        resident = one["resident_bytes"]
        lines.append(
            f"{name:<20}"
            + (f"{prefill / base['prefill_seconds']:>8.2f}" if known else f"{'-':>8}")
            + f"{prefill * 1e3:>10.1f}{b * prompt / prefill:>11,.0f}"
            + (f"{base['decode_seconds'] / decode:>9.2f}" if known else f"{'-':>9}")
            + f"{b * setup.steps / decode:>10,.0f}{one['cache_bytes'] / MIB:>11.3f}"
            + (f"{resident / MIB:>10.3f}" if isinstance(resident, int) else f"{'-':>10}")
            + (f"{base['cache_bytes'] / one['cache_bytes']:>7.1f}" if known else f"{'-':>7}")
            + (f"{base['expected_bytes'] / one['expected_bytes']:>10.1f}" if known else f"{'-':>10}")
            + f"{one['promised_factor']:>10.1f}"
        )
    return lines


def trained_setup(options: argparse.Namespace) -> tuple[Setup, Transformer]:
    """Sizes, weights and text of a selective checkpoint."""
    model, tokens = read_trained(options.checkpoint, options.data_root, options.batch)
    sizes = {name: value for name, value in model.options().items() if value is not None}
    sizes.pop("attention")
    layer = model.blocks[0].attention
    setup = Setup(
        sizes, tokens[:, :-1], options.steps, str(options.device), DTYPES[options.dtype], model.state_dict(),
        layer.qk_norm, {"selection_head": layer.selection_head},
    )  # fmt: skip
    return setup, model


def random_setup(options: argparse.Namespace, context: int) -> Setup:
    """A model of the sizes asked for with its initial weights, and random tokens."""
    sizes = {
        "vocab_size": options.vocab_size,
        "n_layers": options.layers,
        "n_heads": options.heads,
        "d_model": 64 * options.heads,
        "context_length": context,
    }
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(options.vocab_size, (options.batch, context), generator=generator)
    return Setup(sizes, tokens, options.steps, str(options.device), DTYPES[options.dtype])


def parse(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", help=f"default: {' '.join(map(str, FACTORS))}")
    parser.add_argument("--factors", type=float, nargs="+", help="of the budgets, one for each context")
    parser.add_argument("--budgets", help="with --checkpoint: a number, or the file of a search, instead of a factor")
    parser.add_argument("--rules", nargs="+", default=[], choices=[r for r in RULES if r != "selective"])
    parser.add_argument("--steps", type=int, default=64, help="tokens decoded, the last of the context")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, help=f"default: {SIZES['layers']}")
    parser.add_argument("--heads", type=int, help=f"of 64 features; default: {SIZES['heads']}")
    parser.add_argument("--vocab-size", type=int, help=f"default: {SIZES['vocab_size']}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; medians are printed")
    parser.add_argument("--patience", type=float, default=60, help="skip what takes more seconds for one turn")
    parser.add_argument("--no-memory", action="store_true", help="do not measure the caches in processes of their own")
    parser.add_argument(
        "--checkpoint", type=Path, help="weights and validation text of a selective run, at its context"
    )
    parser.add_argument("--data-root", help="with --checkpoint: where its text is now")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args(arguments)
    for name in ("batch", "layers", "heads", "rounds", "steps", "vocab_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    if not options.patience > 0:
        parser.error(f"--patience {options.patience}: expected a number of seconds above 0")
    given = [name for name in ("contexts", *SIZES) if getattr(options, name) is not None]
    if options.checkpoint and given:
        parser.error(f"--{given[0].replace('_', '-')} with --checkpoint: the checkpoint decides it; leave it out")
    for name in ("data_root", "budgets"):
        if getattr(options, name) and not options.checkpoint:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: only read with --checkpoint")
    if options.budgets and options.factors:
        parser.error("--budgets with --factors: give the one or the other")
    for name, default in SIZES.items():
        setattr(options, name, getattr(options, name) or default)
    if options.contexts is None and not options.checkpoint:
        options.contexts = list(FACTORS)
    for context in options.contexts or ():
        if context <= options.steps:
            parser.error(f"--contexts {context}: expected more than --steps {options.steps}, which are decoded in it")
    _read_factors(parser, options)
    if options.json and (options.json.is_dir() or not options.json.resolve().parent.is_dir()):
        parser.error(f"--json {options.json}: expected a file's name in a folder that exists")
    try:
        options.device = usable_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    return parser, options


def _read_factors(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """One factor for each context, or for the checkpoint's."""
    contexts = options.contexts or [None]
    if options.factors is None:
        unknown = [context for context in contexts if context is not None and context not in FACTORS]
        if unknown:
            parser.error(f"--contexts {unknown[0]}: no factor is known for it; give --factors, one for each context")
        options.factors = [FACTORS.get(context, 16.0) for context in contexts]
    if len(options.factors) != len(contexts):
        parser.error(f"--factors: {len(options.factors)} for {len(contexts)} contexts; expected one for each")
    for factor in options.factors:
        if not factor >= 1:
            parser.error(f"--factors {factor}: expected 1 or more")


def budgets_for(factor: float, context: int, n_layers: int) -> list[int]:
    """The same budget in every layer, so that the factor is at least the one asked for where that is possible."""
    return [max(LEAST_BUDGET, int(context / factor))] * n_layers


def main(arguments: list[str] | None = None) -> None:
    parser, options = parse(arguments)
    torch.manual_seed(0)
    source = f"weights and text of {options.checkpoint}" if options.checkpoint else "initial weights, random tokens"
    report: dict[str, Any] = {"machine": machine(options.device), "contexts": {}}
    contexts = options.contexts
    try:
        if options.checkpoint:
            setup, model = trained_setup(options)
            contexts = [setup.context]
            if setup.context <= options.steps:
                parser.error(f"--steps {options.steps}: expected less than the checkpoint's context, {setup.context}")
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    for context, factor in zip(contexts, options.factors, strict=True):
        rule = None
        try:
            if not options.checkpoint:
                setup = random_setup(options, context)
            budgets = budgets_for(factor, context, setup.sizes["n_layers"])
            if options.budgets:
                given = int(options.budgets) if options.budgets.isdigit() else options.budgets
                read = read_budgets(given, model)
                budgets, rule = list(read.budgets), read.rule
        except UserError as error:
            parser.exit(2, f"error: {error}\n")
        if not report["contexts"]:
            sizes = setup.sizes
            print(machine(options.device))
            print(
                f"{source}; {sizes['n_layers']} layers, {sizes['n_heads']} heads, d_model {sizes['d_model']}, "
                f"{options.dtype}; medians of {options.rounds} rounds in turns"
            )
        chosen = contenders(budgets, options.rules, rule)
        figures = measure(setup, chosen, options.rounds, options.patience, not options.no_memory)
        print(*table(figures, setup), sep="\n", flush=True)
        report["contexts"][context] = figures
    if options.json:
        report |= {"setup": source, "batch": options.batch, "steps": options.steps, "rounds": options.rounds}
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
