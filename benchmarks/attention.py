"""Speed and memory of attention: standard, and selective by every kernel there is.

    python benchmarks/attention.py [--contexts N ...] [--only NAME ...] [--checkpoint RUN/last.ckpt] [--json FILE]

For every context length it prints, for the forward pass without gradient (the prefill of inference) and for forward and
backward together, the time as a ratio to standard attention, then milliseconds, then the memory that forward and
backward take beyond the inputs. Contenders take turns in one process; medians. The inputs are random, or with
--checkpoint the queries, keys and values of every layer of a trained selective model on its own validation text,
where the times are summed over layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import MIB, Skipped, free_bytes, in_turns, machine, peak_bytes, progress
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from selmodel.attention.kernels import KERNELS, triton_op
from selmodel.attention.live import death_thresholds
from selmodel.attention.selection import accumulate, selection_scores, selection_statistics
from selmodel.errors import UserError

SMALL = 32  # context of the calls that load libraries before memory is measured
FULL_LOGITS = ("eager", "x-transformers", "flex")  # these keep numbers by the square of the context


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def by_kernel(q: Tensor, k: Tensor, v: Tensor, *, name: str, live_keys: str) -> Tensor:
    return KERNELS[name](q, k, v, live_keys=live_keys)[0]


def x_transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    try:
        from x_transformers.attend import Attend
    except ImportError as error:
        raise Skipped("not installed: pip install -e '.[bench]'") from error
    return Attend(causal=True, selective=True, heads=q.shape[1])(q, k, v)[0]


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention with F as a tensor [b, n, n] that its score function reads."""
    if q.device.type == "cpu" and q.requires_grad and torch.is_grad_enabled():
        raise Skipped("FlexAttention has no backward pass on the CPU")
    b, h, n, d = q.shape
    F = accumulate(selection_scores(q[:, 0] @ k[:, 0].mT * d**-0.5))

    def minus_F(score, batch, head, query, key):
        return score - F[batch, query, key]

    attention, block_mask = _compiled_flex(n, q.device)
    return attention(q, k, v, score_mod=minus_F, block_mask=block_mask, enable_gqa=h != k.shape[1])


@functools.cache
def _compiled_flex(n: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(batch, head, query, key):
        return key <= query

    return torch.compile(flex_attention, dynamic=False), create_block_mask(causal, None, None, n, n, device=device)


CONTENDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "standard": standard,
    "eager": functools.partial(by_kernel, name="eager", live_keys="off"),
    "x-transformers": x_transformers,
    "flex": flex,
    "blockwise": functools.partial(by_kernel, name="blockwise", live_keys="off"),
    "blockwise-live": functools.partial(by_kernel, name="blockwise", live_keys="auto"),
    "triton": functools.partial(by_kernel, name="triton", live_keys="off"),
    "triton-live": functools.partial(by_kernel, name="triton", live_keys="auto"),
}


@dataclasses.dataclass
class Inputs:
    """q, k, v of one layer, and the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    @functools.cached_property
    def live_share(self) -> float:
        """The share of causal pairs whose key is live."""
        thresholds = death_thresholds(self.q, self.k, self.v, "auto")
        statistics = selection_statistics(self.q[:, 0], self.k[:, 0], thresholds=thresholds)
        return statistics.live_share.item()


def random_inputs(b: int, h: int, h_kv: int, n: int, d: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Normal with unit variance, in memory [b, n, heads, d] as the projections leave them."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(b, n, heads, d, generator=generator, device=device).to(dtype).transpose(1, 2)

    return Inputs(normal(h), normal(h_kv), normal(h_kv), normal(h))


def checkpoint_inputs(path: Path, cfg, b: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Inputs], int]:
    """Of every layer, on the first b validation sequences of the run; and the run's context length."""
    from selmodel.config import build
    from selmodel.evaluation.run import load_module
    from selmodel.training.checkpoint import read_checkpoint

    run, tokenizer, module = load_module(read_checkpoint(path), path, cfg)
    model = module.model.eval()
    if not hasattr(model.blocks[0].attention, "selection_head"):
        raise UserError(f"--checkpoint {path}: its attention is not selective")
    if model.blocks[0].attention.selection_head != 0:
        raise UserError(f"--checkpoint {path}: its selection head is not 0, which the other contenders cannot take")
    run.data.validation_batch_size = b
    source = build(run.data.source)
    source.prepare()
    data = build(run.data, source=source, tokenizer=tokenizer)
    data.setup("validate")
    tokens = next(iter(data.val_dataloader()))["tokens"][:b, :-1]
    layers = []

    def keep(layer, q, k, v):
        generator = torch.Generator().manual_seed(0)
        grad = torch.randn(q.transpose(1, 2).shape, generator=generator).transpose(1, 2)
        layers.append(Inputs(*(x.detach().to(device, dtype) for x in (q, k, v, grad))))

    for block in model.blocks:
        attend = block.attention.attend

        def seen(q, k, v, document_ids, layer=block.attention, attend=attend):
            keep(layer, q, k, v)
            return attend(q, k, v, document_ids)

        block.attention.attend = seen
    with torch.no_grad():
        model(tokens)
    return layers, tokens.shape[1]


def forward(contender: Callable, inputs: Inputs) -> None:
    with torch.no_grad():
        contender(inputs.q, inputs.k, inputs.v)


def forward_backward(contender: Callable, inputs: Inputs) -> None:
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    contender(q, k, v).backward(inputs.grad)


def prepared(name: str, b: int, h: int, h_kv: int, n: int, d: int, dtype: torch.dtype, device: str) -> Callable:
    """For the measurement of memory, in a process of its own."""
    device = torch.device(device)
    forward_backward(CONTENDERS[name], random_inputs(b, h, h_kv, SMALL, d, dtype, device))
    inputs = random_inputs(b, h, h_kv, n, d, dtype, device)
    return functools.partial(forward_backward, CONTENDERS[name], inputs)


def measure(layers: list[Inputs], names: list[str], options: argparse.Namespace, memory: bool) -> dict[str, dict]:
    """By contender: forward and forward_backward in seconds, peak_bytes, or in their place why there is none."""
    q = layers[0].q
    b, h, n, d = q.shape
    h_kv = layers[0].k.shape[1]
    limit = options.memory_limit * 2**30 if options.memory_limit else free_bytes(q.device) / 2
    results: dict[str, dict] = {name: {} for name in names}
    too_large = {}
    for name in names:
        # Logits, weights and their gradients.
        needed = 4 * b * h * n * n * max(q.element_size(), 4)
        if name in FULL_LOGITS and needed > limit:
            too_large[name] = Skipped(f"about {needed / 2**30:.0f} GiB of logits, more than --memory-limit")
    for measure_name, function in (("forward", forward), ("forward_backward", forward_backward)):
        totals: dict[str, float | Skipped] = {name: too_large.get(name, 0.0) for name in names}
        for number, inputs in enumerate(layers):
            progress(f"context {n}: {measure_name}, layer {number + 1} of {len(layers)}")
            running = [name for name in names if not isinstance(totals[name], Skipped)]
            calls = {name: functools.partial(_guarded, function, CONTENDERS[name], inputs) for name in running}
            for name, took in in_turns(calls, options.rounds, options.patience, q.device).items():
                totals[name] = took if isinstance(took, Skipped) else totals[name] + took
        for name, total in totals.items():
            results[name][measure_name] = total
    for name in names:
        skip = results[name]["forward_backward"]
        results[name]["peak_bytes"] = skip if isinstance(skip, Skipped) else None
        if memory and not isinstance(skip, Skipped):
            progress(f"context {n}: memory of {name}")
            try:
                results[name]["peak_bytes"] = peak_bytes(
                    prepared, name, b, h, h_kv, n, d, q.dtype, str(q.device), device=q.device
                )
            except Skipped as reason:
                results[name]["peak_bytes"] = reason
    progress("")
    return results


def _guarded(function: Callable, contender: Callable, inputs: Inputs) -> None:
    """What a contender cannot do is a reason to skip it, not the end of the benchmark."""
    try:
        function(contender, inputs)
    except Skipped:
        raise
    except Exception as error:
        raise Skipped(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}") from error


def table(title: str, results: dict[str, dict]) -> list[str]:
    """Lines for a terminal: ratios to standard attention first."""
    standard_result = results["standard"]
    lines = [
        "",
        title,
        f"{'':<16}{'forward (prefill)':^22}{'forward+backward':^22}{'memory':>10}",
        f"{'':<16}{'x standard':>11}{'ms':>10} {'x standard':>11}{'ms':>10}{'MiB':>11}",
    ]
    notes = []
    for name, result in results.items():
        line = f"{name:<16}"
        for measure_name in ("forward", "forward_backward"):
            value, base = result[measure_name], standard_result[measure_name]
            if isinstance(value, Skipped) or isinstance(base, Skipped):
                line += f"{'-':>11}{'-':>10} "
                notes.append(f"  {name}, {measure_name.replace('_', '+')}: {value}")
            else:
                line += f"{value / base:>11.2f}{value * 1e3:>10.1f} "
        value = result["peak_bytes"]
        lines.append(line + (f"{value / MIB:>10.0f}" if isinstance(value, int) else f"{'-':>10}"))
    return lines + list(dict.fromkeys(notes))


def agreement(names: list[str], dtype: torch.dtype, device: torch.device) -> list[str]:
    """How far each contender is from the definition in float64 on a small input: are these the same function?"""
    inputs = random_inputs(2, 4, 4, 64, 32, dtype, device)
    exact = KERNELS["eager"](inputs.q.double(), inputs.k.double(), inputs.v.double())[0]
    found = []
    for name in names:
        if name == "standard":
            continue
        try:
            with torch.no_grad():
                error = (CONTENDERS[name](inputs.q, inputs.k, inputs.v).double() - exact).norm() / exact.norm()
            found.append(f"{name} {error:.0e}")
        except Exception as reason:
            found.append(f"{name} - ({str(reason).strip().splitlines()[0][:60]})")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192], metavar="N")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=64)
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
    for name in ("batch", "heads", "head_dim", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: expected 1 or more")
    if any(n < 1 for n in options.contexts):
        parser.error(f"--contexts {options.contexts}: expected numbers of tokens, 1 or more")
    kv_heads = options.kv_heads or options.heads
    if options.heads % kv_heads:
        parser.error(f"--kv-heads {kv_heads}: expected a divisor of --heads {options.heads}")
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"--json {options.json}: its folder does not exist")
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    names = list(dict.fromkeys(["standard", *(options.only or CONTENDERS)]))
    missing = triton_op.availability(device.type)
    if missing and not options.only:
        names = [name for name in names if not name.startswith("triton")]

    print(machine(device))
    print(
        f"{options.dtype}, medians of {options.rounds} rounds in turns" + (f"; no triton: {missing}" if missing else "")
    )
    print("relative error against the definition in float64:", ", ".join(agreement(names, dtype, device)))
    report = {"machine": machine(device), "dtype": options.dtype, "rounds": options.rounds, "results": []}
    if options.checkpoint:
        cfg = OmegaConf.create({"data": {"root": options.data_root}, "cache_dir": None})
        try:
            layers, n = checkpoint_inputs(options.checkpoint, cfg, options.batch, dtype, device)
        except UserError as error:
            sys.exit(f"error: {error}")
        shapes = [(f"q, k, v of {options.checkpoint}", layers)]
        shares = ", ".join(f"{x.live_share:.0%}" for x in layers)
        note = f"{len(layers)} layers, summed; live pairs by layer: {shares}"
    else:
        shapes = [(None, n) for n in options.contexts]
    for title, what in shapes:
        if title is None:
            inputs = random_inputs(options.batch, options.heads, kv_heads, what, options.head_dim, dtype, device)
            layers, title, note = [inputs], "random inputs", f"live pairs {inputs.live_share:.0%}"
        b, h, n, d = layers[0].q.shape
        results = measure(layers, names, options, memory=not options.no_memory)
        print(*table(f"context {n}, batch {b}, {h} heads of {d}, {title}; {note}", results), sep="\n", flush=True)
        readable = {
            name: {key: str(x) if isinstance(x, Skipped) else x for key, x in result.items()}
            for name, result in results.items()
        }
        shape = {"inputs": title, "batch": b, "heads": h, "context": n, "head_dim": d}
        report["results"].append({**shape, "live_share": [x.live_share for x in layers], "contenders": readable})
        if options.json:
            options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
