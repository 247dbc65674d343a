"""``train.py replay=RUN/skipped/step-N.pt``: the batch of a skipped step, looked at again."""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selmodel.errors import UserError
from selmodel.training.checkpoint_file import BEST, LAST, PREVIOUS, DamagedCheckpoint, read_checkpoint
from selmodel.training.guards import FOLDER
from selmodel.training.loading import TrainedRun, load_run
from selmodel.training.losses import token_losses

log = logging.getLogger(__name__)

SHOWN = 8  # sequences, and parameters, that are told of
WIDTH = 70  # characters of a text
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class Replay:
    """What one pass over a batch gave.

    Attributes:
        precision: of the arithmetic.
        losses: [sequences] mean loss of each in nats; NaN or infinite where that is what it is.
        norms: by parameter, the norm of its gradient.
    """

    precision: str
    losses: list[float]
    norms: dict[str, float]

    @property
    def bad_sequences(self) -> list[int]:
        """Sequences whose loss is not finite."""
        return [row for row, loss in enumerate(self.losses) if not math.isfinite(loss)]

    @property
    def bad_parameters(self) -> list[str]:
        """Parameters whose gradient is not finite."""
        return [name for name, norm in self.norms.items() if not math.isfinite(norm)]

    def line(self) -> str:
        """The figures in one line."""
        if not self.bad_sequences and not self.bad_parameters:
            norm = math.sqrt(sum(value**2 for value in self.norms.values()))
            mean = sum(self.losses) / len(self.losses)
            return f"in {self.precision}: all finite, loss {mean:.4f}, norm of the gradient {norm:.4g}"
        return (
            f"in {self.precision}: not finite are the losses of {len(self.bad_sequences)} of {len(self.losses)} "
            f"sequences and the gradients of {len(self.bad_parameters)} of {len(self.norms)} parameters"
        )


def replay(path: str | Path) -> list[Replay]:
    """Go over the batch of a skipped step once more, and say what in it is not finite; nothing is trained.

    The weights are those of the run's newest checkpoint from before the step, or of its oldest one.

    Args:
        path: a file that ``selmodel.training.guards`` has kept.

    Returns:
        one pass in the run's precision and, where that is a mixed one, one in float32.

    Raises:
        UserError: for a file that is not there or no such batch, and a run without a whole checkpoint.
    """
    path = Path(str(path)).expanduser().resolve()
    batch = _read(path)
    run_dir, step = path.parent.parent, batch["optimizer_step"]
    run = _weights_before(run_dir, step)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precisions = [run.precision]
    if run.precision not in ("32-true", "32"):
        precisions.append("32-true")
    passes = [_pass(run, batch, precision, device) for precision in precisions]
    texts = [run.tokenizer.decode(row.tolist()) for row in batch["tokens"]]
    # The bad ones first, then those of the highest loss.
    order = sorted(
        range(len(texts)), key=lambda row: -passes[0].losses[row] if math.isfinite(passes[0].losses[row]) else -math.inf
    )
    exactly = "the weights of that step" if run.step == step - 1 else "not exactly the weights of that step"
    lines = [
        f"step {step}, global batch {int(batch['step'])} of the data: {len(texts)} sequences of "
        f"{batch['tokens'].shape[1] - 1} tokens",
        f"with {run.path.name}, step {run.step}: {exactly}",
        *(one.line() for one in passes),
        "",
        f"{'sequence':>8}  {'loss':>10}  text",
        *(f"{row:>8}  {passes[0].losses[row]:>10.4f}  {_shown(texts[row])}" for row in order[:SHOWN]),
    ]
    bad = passes[0].bad_parameters
    if bad:
        lines += [
            "",
            "gradients that are not finite: " + ", ".join(bad[:SHOWN]) + (", ..." if len(bad) > SHOWN else ""),
        ]
    else:
        largest = sorted(passes[0].norms.items(), key=lambda item: -item[1])[:SHOWN]
        lines += ["", "largest gradients: " + ", ".join(f"{name} {norm:.3g}" for name, norm in largest)]
    for line in lines:
        log.info("%s", line)
    return passes


def _read(path: Path) -> dict[str, Any]:
    expected = f"expected a file RUN/{FOLDER}/step-N.pt, which a run keeps of each step that it skips"
    if not path.is_file():
        raise UserError(f"replay={path}: no such file; {expected}")
    try:
        batch = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, by what is damaged
        raise UserError(f"replay={path}: cannot be read ({type(error).__name__}); {expected}") from error
    if not isinstance(batch, dict) or not {"tokens", "step", "optimizer_step"} <= set(batch):
        raise UserError(f"replay={path}: is no batch of a skipped step; {expected}")
    return batch


def _weights_before(run_dir: Path, step: int) -> TrainedRun:
    steps: dict[int, Path] = {}
    for name in (BEST, PREVIOUS, LAST):
        with contextlib.suppress(DamagedCheckpoint):
            if (run_dir / name).exists():
                steps[read_checkpoint(run_dir / name)["selmodel"]["step"]] = run_dir / name
    if not steps:
        raise UserError(f"replay: {run_dir} has no whole checkpoint, whose weights the batch could be tried with")
    before = [one for one in steps if one < step]
    return load_run(steps[max(before) if before else min(steps)])


def _pass(run: TrainedRun, batch: dict[str, Any], precision: str, device: torch.device) -> Replay:
    model = run.model.to(device)
    model.zero_grad(set_to_none=True)
    tokens = batch["tokens"].to(device)
    documents = batch.get("document_ids")
    documents = None if documents is None else documents[:, :-1].to(device)
    mask = batch.get("target_mask")
    counted = torch.ones_like(tokens[:, 1:], dtype=torch.bool) if mask is None else mask.to(device)
    dtype = AUTOCAST.get(precision)
    losses: list[Tensor] = []
    for row in range(len(tokens)):  # one by one: a sequence must not hide behind another's NaN
        with contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype):
            output = model(tokens[row : row + 1, :-1], None if documents is None else documents[row : row + 1])
        values = token_losses(output.logits, tokens[row : row + 1, 1:])[0]
        total = values[counted[row]].sum()
        (total / counted.sum()).backward()
        losses.append(total.detach() / counted[row].sum().clamp(min=1))
    norms = {name: one.grad.norm().item() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    return Replay(precision, [loss.item() for loss in losses], norms)


def _shown(text: str) -> str:
    line = repr(text)[1:-1]
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."
