"""Where a run goes on from, and whether it may."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selmodel.comparing import differences
from selmodel.errors import UserError
from selmodel.training.checkpoint_file import BEST, LAST, PREVIOUS, newest_checkpoint, read_checkpoint

log = logging.getLogger(__name__)

# Settings whose change on resume is not worth a line: they do not change what is computed.
_FREE = (
    "runs_root", "run_dir", "resume", "cache_dir", "logger", "callbacks", "sample", "compile", "data.workers",
    "data.prefetch", "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.log_every_n_steps",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from.

    Attributes:
        path: of the file.
        checkpoint: its contents.
        passed: newer ones of the run that are damaged, each with what is wrong with it.
    """

    path: Path
    checkpoint: dict
    passed: Sequence[tuple[Path, str]] = ()


def find_checkpoint(run_dir: Path, resume: str) -> Found | None:
    """The checkpoint that ``resume`` asks for.

    Args:
        run_dir: the run's directory.
        resume: ``auto`` for the newest whole checkpoint in ``run_dir`` if there is one, ``never``, or a checkpoint's
            path.

    Raises:
        UserError: ``never`` in a directory that holds a run, a path that does not exist, checkpoints none of which is
            whole.
    """
    last = run_dir / LAST
    holds_run = (run_dir / "train.csv").exists() or any((run_dir / name).exists() for name in (LAST, PREVIOUS, BEST))
    if resume == "auto":
        path, checkpoint, passed = newest_checkpoint(run_dir)
        return None if path is None else Found(path, checkpoint, passed)
    if resume == "never":
        if holds_run:
            raise UserError(
                f"resume=never: {run_dir} already holds a run, which would be overwritten; "
                "choose another run_dir=..., remove that folder, or go on with resume=auto"
            )
        return None
    path = Path(resume).expanduser().resolve()
    if path.is_dir():
        path = path / LAST
    if not path.is_file():
        raise UserError(
            f"resume={resume}: no such file; expected auto, never, or the path of a checkpoint (RUN/{LAST})"
        )
    if path.parent == run_dir or not holds_run:
        return Found(path, read_checkpoint(path))
    if last.exists():
        own = newest_checkpoint(run_dir)
        if own[1]["selmodel"]["config"]["resume"] == resume:
            return Found(*own)  # begun from that checkpoint by the same command, and further now
    raise UserError(
        f"resume={resume}: {run_dir} already holds another run, which would be overwritten; choose another run_dir=..."
    )


def check_identity(checkpoint: dict, identity: dict, path: Path) -> None:
    """Refuse to go on from a checkpoint of another model or tokenizer.

    Args:
        checkpoint: as ``read_checkpoint`` returns it.
        identity: of the present run, as stored under ``selmodel`` in its own checkpoints.
        path: of the checkpoint, for the message.

    Raises:
        UserError: naming each difference in architecture or tokenizer, with both values.
    """
    stored = checkpoint["selmodel"]
    faults = [f"model: {difference}" for difference in differences(stored["architecture"], identity["architecture"])]
    if stored["tokenizer"]["hash"] != identity["tokenizer"]["hash"]:
        faults.append(
            f"tokenizer: {_short(stored['tokenizer'])} in the checkpoint, {_short(identity['tokenizer'])} now"
        )
    if faults:
        raise UserError(
            f"resume: {path} is of another run:\n  " + "\n  ".join(faults) + "\n"
            "Use the settings it was trained with, or another run_dir=... for a new run"
        )


def _short(tokenizer: dict) -> str:
    return f"{tokenizer['kind']} {tokenizer['hash'][:12]}"


def changed_settings(stored: dict, current: dict) -> list[str]:
    """Settings that differ between the checkpoint's configuration and the present one, except the free ones."""
    return [
        line
        for line in differences(stored, current)
        if not any(line.startswith((f"{free}:", f"{free}.")) for free in _FREE)
    ]


def load_weights(checkpoint: dict, module) -> None:
    """Load the network's weights, all of them, into a ``LanguageModel``.

    Raises:
        UserError: when a name is missing or not expected.
    """
    missing, unexpected = module.load_state_dict(checkpoint["state_dict"], strict=False)
    if missing or unexpected:
        raise UserError(
            f"checkpoint: its weights do not fit the model: missing {sorted(missing)[:5]}, not expected "
            f"{sorted(unexpected)[:5]}"
        )
