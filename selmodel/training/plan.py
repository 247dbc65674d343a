"""``plan=true``: what a run will take, on one screen, before anything is read or trained."""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig

from selmodel.config import build, plain
from selmodel.data.tasks import Task
from selmodel.errors import UserError
from selmodel.model import Transformer
from selmodel.training.memory import PARTS, StepMemory, step_memory
from selmodel.training.setup import count_devices, resolve_precision

log = logging.getLogger(__name__)

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
WEIGHT_TYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
# last.ckpt, best.ckpt, and the one being written before it takes the place of another.
CHECKPOINTS_AT_ONCE = 4
# Share of the memory asked for that an allocator keeps beyond it (docs/LOG.md).
ALLOCATOR_SHARE = 0.15


@dataclass(frozen=True)
class Plan:
    """What a run will take.

    Attributes:
        model: the network, without memory (device ``meta``).
        vocabulary_note: where the number of pieces comes from.
        precision: of the arithmetic, as in ``lightning.Trainer``.
        devices: that share a step.
        rows, n_passes: sequences of one pass on one device, and passes of one step.
        sequence_length: targets of a sequence.
        tokens_per_step, steps: targets of an optimizer step over all devices, and optimizer steps.
        memory: of one device at the peak of a step.
        memory_free: bytes free for it on this machine, None when not known.
        checkpoint: bytes of one checkpoint.
        disk_free: bytes free where the run will lie.
    """

    model: Transformer
    vocabulary_note: str
    precision: str
    devices: int
    rows: int
    n_passes: int
    sequence_length: int
    tokens_per_step: int
    steps: int
    memory: StepMemory
    memory_free: int | None
    checkpoint: int
    disk_free: int

    @property
    def disk(self) -> int:
        """Bytes that the run needs on disk: its checkpoints, the one being written included."""
        return CHECKPOINTS_AT_ONCE * self.checkpoint

    def warnings(self) -> list[str]:
        """What will not fit, each with a way out."""
        found = []
        needed = math.ceil(self.memory.total * (1 + ALLOCATOR_SHARE))
        if self.memory_free is not None and needed > self.memory_free:
            found.append(
                f"memory: a step takes about {gib(needed)} with what the allocator keeps, and {gib(self.memory_free)} "
                "are free; lower micro_batch_tokens (same numbers), or set model.checkpoint_activations=true"
            )
        if self.disk > self.disk_free:
            found.append(
                f"disk: checkpoints take {gib(self.disk)}, and {gib(self.disk_free)} are free; choose another run_dir "
                "or runs_root, or callbacks.checkpoint.monitor=null for no best.ckpt"
            )
        return found

    def lines(self) -> list[str]:
        """The screen."""
        model, options = self.model, self.model.options()
        counts = model.n_parameters()
        n = self.sequence_length
        tokens = self.tokens_per_step * self.steps
        flops = model.flops_per_token(n)
        parts = self.memory.parts
        lines = [
            "plan: nothing is trained and nothing written",
            "",
            f"model        {options['attention']['kind']}, {model.n_layers} layers of {model.n_heads} heads of "
            f"{model.head_dim}, d_model {model.d_model}, d_ff {model.d_ff},",
            f"             context {model.context_length:,}, positions {model.positions}, {model.vocab_size:,} pieces"
            f"{self.vocabulary_note}",
            f"parameters   {counts['total']:,}",
            "             "
            + ", ".join(f"{name} {count:,}" for name, count in counts.items() if name != "total" and count),
            f"training     {self.steps:,} steps of {self.tokens_per_step // n:,} sequences of {n:,} tokens: "
            f"{self.tokens_per_step:,} tokens a step, {tokens:,} in all",
            f"each step    on {_count(self.devices, 'device')}, each {_count(self.n_passes, 'pass', 'passes')} "
            f"of up to {_count(self.rows, 'sequence')}",
            f"arithmetic   {_si(flops)}FLOP a token, {_si(flops * self.tokens_per_step)}FLOP a step, "
            f"{_si(flops * tokens)}FLOP in all, {self.precision}",
            f"data         sequences 0 to {self.steps * (self.tokens_per_step // n) - 1:,} of the training order, each "
            "made once; a resumed run goes on with the next",
            "",
            "memory of a device at the peak of a step",
            *(f"  {name:<18}{mib(parts[name]):>12}" for name in PARTS),
            f"  {'in all':<18}{mib(self.memory.total):>12}, and up to {ALLOCATOR_SHARE:.0%} that the allocator keeps; "
            + ("free here: not known" if self.memory_free is None else f"free here: {gib(self.memory_free)}"),
            "",
            f"disk         {mib(self.checkpoint)} a checkpoint; last, previous, best and one being written: "
            f"{mib(self.disk)}; free here: {gib(self.disk_free)}",
        ]
        warnings = self.warnings()
        lines += ["", *(f"will not fit: {warning}" for warning in warnings)] if warnings else []
        return lines


def make_plan(cfg: DictConfig, run_dir: Path) -> Plan:
    """The plan of ``cfg`` (``configs/train.yaml``), which has passed its checks. Reads no data and needs no GPU.

    Raises:
        UserError: a tokenizer whose size cannot be known, and a batch that the devices cannot share.
    """
    vocab_size, note = _vocabulary(cfg)
    trainer = plain(cfg.trainer)
    with torch.device("meta"):  # no memory, no initial values
        model = build(cfg.model, attention=build(cfg.attention), vocab_size=vocab_size)
    precision = resolve_precision(trainer) or "32-true"
    model.to(WEIGHT_TYPES.get(precision, torch.float32))
    devices = count_devices(trainer) * int(trainer.get("num_nodes") or 1)
    if cfg.data.batch_size % devices:
        raise UserError(
            f"data.batch_size={cfg.data.batch_size} with {devices} devices: must be a multiple of their number"
        )
    source = build(cfg.data.source)
    n = source.n_symbols(cfg.data.max_length) if isinstance(source, Task) else model.context_length
    share = cfg.data.batch_size // devices
    rows = share
    if cfg.micro_batch_tokens is not None:
        rows = min(share, max(1, cfg.micro_batch_tokens // n))
    n_passes = -(-share // rows)
    memory = step_memory(
        model,
        rows=rows,
        n=n,
        n_passes=n_passes,
        autocast=AUTOCAST.get(precision),
        document_mask=bool(cfg.data.get("document_mask", False)),
    )
    checkpoint = memory.parts["weights"] + memory.parts["optimizer"]
    strategy = trainer.get("strategy")
    if isinstance(strategy, dict) and strategy["_target_"].endswith(".FullySharded"):
        memory = _shared_out(memory, devices)
    parent = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    return Plan(
        model=model,
        vocabulary_note=note,
        precision=precision,
        devices=devices,
        rows=rows,
        n_passes=n_passes,
        sequence_length=n,
        tokens_per_step=cfg.data.batch_size * n,
        steps=cfg.trainer.max_steps,
        memory=memory,
        memory_free=_memory_free(trainer),
        checkpoint=checkpoint,
        disk_free=shutil.disk_usage(parent).free,
    )


def print_plan(cfg: DictConfig, run_dir: Path) -> None:
    """Write the plan's screen to the log."""
    for line in make_plan(cfg, run_dir).lines():
        log.info(line)


def _shared_out(memory: StepMemory, devices: int) -> StepMemory:
    """The memory of a device where weights, gradients and optimizer are shared out (FSDP).

    What it fetches of the others' weights for the layer at work is not counted.
    """
    shared = ("weights", "gradients", "optimizer")
    parts = {part: -(-size // devices) if part in shared else size for part, size in memory.parts.items()}
    return StepMemory(parts)


def _vocabulary(cfg: DictConfig) -> tuple[int, str]:
    """Number of pieces, and a note on it; without reading or training anything that is not there."""
    size = cfg.tokenizer.get("vocab_size")
    if size is not None:
        return size, ""
    source = build(cfg.data.source)
    if isinstance(source, Task):
        return build(cfg.tokenizer).build(source, cfg.cache_dir).vocab_size, " of the task"
    tokenizer = build(cfg.tokenizer).build(None, cfg.cache_dir)
    return tokenizer.vocab_size, f" of {tokenizer.name}"


def _memory_free(trainer: dict) -> int | None:
    """Bytes free on the device a run would take; None where it is not on this machine or not known."""
    accelerator = trainer.get("accelerator", "auto")
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    if accelerator not in ("auto", "cpu"):
        return None
    free = [_meminfo(Path("/proc/meminfo")), _group_limit(Path("/sys/fs/cgroup"))]
    known = [value for value in free if value is not None]
    return min(known, default=None)


def _meminfo(path: Path) -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _group_limit(path: Path) -> int | None:
    """What a container's limit leaves."""
    try:
        limit = (path / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit) - int((path / "memory.current").read_text())
    except (OSError, ValueError):
        return None


def mib(n: int) -> str:
    return f"{n / 2**20:,.1f} MiB"


def gib(n: int) -> str:
    return f"{n / 2**30:,.2f} GiB"


def _si(value: float) -> str:
    """``value`` to three figures with a prefix: 1.23 G."""
    exponent = min(int(math.log10(value)) // 3, 7) if value >= 1 else 0
    return f"{value / 1000**exponent:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E', 'Z'][exponent]}"


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"
