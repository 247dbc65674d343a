"""The whole training step: standard attention against selective.

    python benchmarks/step.py [--context N] [--batch N] [--depth N] [--checkpoint RUN/last.ckpt]

A step is what training does with a batch: gradients to zero, forward, loss, backward, clipping, AdamW. The models have
the same parameters and take turns in one process; medians of the step's time as a ratio to standard attention, then
milliseconds and tokens per second, and the memory a step takes at its highest beyond model and optimizer. An untrained
model has few dead keys; with --checkpoint all models have the weights of a trained selective one.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import MIB, Skipped, in_turns, machine, peak_bytes
from omegaconf import OmegaConf
from torch import Tensor

from selmodel.attention import SelectiveAttention, StandardAttention
from selmodel.attention.kernels import KERNELS, triton_op
from selmodel.errors import UserError
from selmodel.model import Transformer
from selmodel.training.losses import loss_sum
from selmodel.training.optim import AdamW

ATTENTION: dict[str, Callable] = {"standard": StandardAttention} | {
    name + ("-live" if live_keys == "auto" else ""): functools.partial(
        SelectiveAttention, kernel=name, live_keys=live_keys
    )
    for name in KERNELS
    for live_keys in ("off", "auto")
    if not (name == "eager" and live_keys == "auto")
}


def make_step(name: str, sizes: dict, state: dict | None, tokens: Tensor, device: str) -> Callable[[], None]:
    """A model, its optimizer and a batch tokens [b, n + 1], as the step to be measured."""
    model = Transformer(attention=ATTENTION[name], **sizes)
    model.init_weights(0)
    if state is not None:
        model.load_state_dict(state)
    model.to(device)
    # So small a rate that a trained model stays what it is while it is measured.
    optim = AdamW(lr=1e-9, schedule="constant", schedule_steps=1, warmup_steps=0)
    optimizer = optim.build(model)
    tokens = tokens.to(device)
    mixed = torch.autocast("cuda", dtype=torch.bfloat16, enabled=device.startswith("cuda"))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with mixed:
            loss = loss_sum(model(tokens[:, :-1]).logits, tokens[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.gradient_clip)
        optimizer.step()

    return step


def prepared(*arguments) -> Callable[[], None]:
    """For the measurement of memory: a step after a first one, which makes the optimizer's state."""
    step = make_step(*arguments)
    step()
    return step


def trained(path: Path, data_root: str | None, batch: int) -> tuple[dict, dict, Tensor]:
    """Sizes and weights of a selective checkpoint, and the first sequences of its validation text."""
    from selmodel.config import build
    from selmodel.evaluation.run import load_module
    from selmodel.training.checkpoint import read_checkpoint

    cfg = OmegaConf.create({"data": {"root": data_root}, "cache_dir": None})
    run, tokenizer, module = load_module(read_checkpoint(path), path, cfg)
    model = module.model
    attention = model.options()["attention"]
    if attention != SelectiveAttention(8, 1, 8).options():
        raise UserError(f"--checkpoint {path}: its attention is {attention}, expected selective with default options")
    source = build(run.data.source)
    source.prepare()
    run.data.validation_batch_size = batch
    data = build(run.data, source=source, tokenizer=tokenizer)
    data.setup("validate")
    tokens = next(iter(data.val_dataloader()))["tokens"][:batch]
    sizes = {name: value for name, value in model.options().items() if name != "attention"}
    if sizes["rope_base"] is None:
        del sizes["rope_base"]
    return sizes, model.state_dict(), tokens


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8, help="of 64 features; d_model is 64 times as many")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--only", nargs="+", choices=ATTENTION, metavar="NAME", help=", ".join(ATTENTION))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--patience", type=float, default=60, help="skip what takes more seconds for one step")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--checkpoint", type=Path, help="its sizes and weights, and its own validation text")
    parser.add_argument("--data-root", help="with --checkpoint: where its text is now")
    options = parser.parse_args(arguments)
    for name in ("context", "batch", "layers", "heads", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected 1 or more")
    device = torch.device(options.device)
    missing = triton_op.availability(device.type)
    names = list(options.only or (name for name in ATTENTION if not (missing and name.startswith("triton"))))
    names = list(dict.fromkeys(["standard", *names]))

    if options.checkpoint:
        try:
            sizes, state, tokens = trained(options.checkpoint, options.data_root, options.batch)
        except UserError as error:
            sys.exit(f"error: {error}")
        title = f"weights and text of {options.checkpoint}"
    else:
        sizes = {
            "vocab_size": options.vocab_size,
            "n_layers": options.layers,
            "n_heads": options.heads,
            "d_model": 64 * options.heads,
            "context_length": options.context,
        }
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(options.vocab_size, (options.batch, options.context + 1), generator=generator)
        state, title = None, "initial weights, random tokens"
    b, n = tokens.shape[0], tokens.shape[1] - 1
    print(machine(device))
    print(
        f"{title}; {sizes['n_layers']} layers, {sizes['n_heads']} heads, d_model {sizes['d_model']}, "
        f"{b} sequences of {n} tokens; medians of {options.rounds} rounds in turns"
    )
    steps = {name: make_step(name, sizes, state, tokens, options.device) for name in names}
    took = in_turns(steps, options.rounds, options.patience, device)
    del steps
    if isinstance(took["standard"], Skipped):
        sys.exit(f"error: standard attention: {took['standard']}; raise --patience")
    print(f"{'':<16}{'x standard':>11}{'ms':>10}{'tokens/s':>11}{'MiB':>9}")
    for name, seconds in took.items():
        if isinstance(seconds, Skipped):
            print(f"{name:<16} {seconds}")
            continue
        memory = "-"
        if not options.no_memory:
            try:
                peak = peak_bytes(prepared, name, sizes, state, tokens, options.device, device=device)
                memory = f"{peak / MIB:.0f}"
            except Skipped as reason:
                memory = f"- ({reason})"
        ratio = seconds / took["standard"]
        print(f"{name:<16}{ratio:>11.2f}{seconds * 1e3:>10.0f}{b * n / seconds:>11,.0f}{memory:>9}", flush=True)


if __name__ == "__main__":
    main()
