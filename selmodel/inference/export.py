"""``evaluate.py export=DIR``: a trained model as a Hugging Face folder."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from selmodel.budgets import Pruning, read_budgets
from selmodel.data.caching import umask
from selmodel.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from selmodel.errors import UserError
from selmodel.inference.model_card import model_card
from selmodel.training.loading import TrainedRun, load_run
from selmodel.training.summary import recorded_results

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RECORD = "selmodel.json"


def export(cfg: DictConfig) -> Path:
    """Write ``cfg.checkpoint`` as the folder ``cfg.export`` (``configs/evaluate.yaml``), and say what it holds.

    Raises:
        UserError: for a folder that exists, without ``overwrite=true`` or where it is no export; an unknown
            ``export_dtype``; budgets that do not fit the model; a tokenizer that has no Hugging Face form.
    """
    if cfg.export_dtype not in DTYPES:
        raise UserError(f"export_dtype={cfg.export_dtype}: must be one of {', '.join(DTYPES)}")
    if not isinstance(cfg.overwrite, bool):
        raise UserError(f"overwrite={cfg.overwrite}: expected true or false")
    folder = Path(str(cfg.export)).expanduser().absolute()
    check_target(folder, overwrite=cfg.overwrite)
    if cfg.checkpoint is None:
        raise UserError("checkpoint: not given; expected checkpoint=RUN/last.ckpt or the folder of a run")
    run = load_run(cfg.checkpoint)
    budgets = OmegaConf.to_container(cfg.budgets) if OmegaConf.is_list(cfg.budgets) else cfg.budgets
    pruning = read_budgets(budgets, run.model, rule=cfg.rule, n_sinks=cfg.n_sinks)
    write_folder(run, folder, dtype=DTYPES[cfg.export_dtype], pruning=pruning, overwrite=cfg.overwrite)
    size = sum(path.stat().st_size for path in folder.iterdir())
    log.info("%s, step %d", run.path, run.step)
    log.info("  written to           %s, %.1f MB in %s", folder, size / 1e6, cfg.export_dtype)
    log.info(
        "  to load it           import selmodel.huggingface; AutoModelForCausalLM.from_pretrained(%r)", str(folder)
    )
    return folder


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder to write to that holds something else, or, unless ``overwrite``, anything. Raises UserError."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"export={folder}: is a file; expected the name of a new folder")
    if not any(folder.iterdir()):
        return
    if not (folder / RECORD).is_file():
        raise UserError(f"export={folder}: exists and is no export, so it is left alone; expected a new folder")
    if not overwrite:
        raise UserError(
            f"export={folder}: exists; expected a new folder, or overwrite=true to replace the export there"
        )


def write_folder(
    run: TrainedRun,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    pruning: Pruning | None = None,
    overwrite: bool = False,
) -> None:
    """Write a run's model as a Hugging Face folder, which is there as a whole or not at all.

    Args:
        run: is left with its weights in ``dtype``.
        folder: where to.
        dtype: of the weights.
        pruning: the budgets that ``generate()`` keeps to; None: none.
        overwrite: replace an export that is there.

    Raises:
        UserError: see ``export``.
    """
    # Not at the top: it takes seconds, which other suites should not wait for.
    from selmodel.huggingface import SelModelConfig, SelModelForCausalLM

    check_target(folder, overwrite=overwrite)
    tokenizer = to_hugging_face(run.tokenizer)
    tokenizer.model_max_length = run.model.context_length
    kept = {} if pruning is None or pruning.budgets is None else pruning.arguments()
    config = SelModelConfig.from_model(
        run.model, bos_token_id=run.tokenizer.bos_id, eos_token_id=run.tokenizer.eos_id,
        pad_token_id=run.tokenizer.eos_id, **kept,
    )  # fmt: skip
    config.dtype = dtype
    with torch.device("meta"):
        model = SelModelForCausalLM(config)
    model.model = run.model.to(dtype)
    model.eval()
    record = describe(run, str(dtype).removeprefix("torch."), kept)
    with _new_folder(folder) as new:
        with _quiet():
            model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        for path in new.iterdir():  # some are written for their owner alone
            path.chmod(0o666 & ~umask())
        (new / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        (new / "README.md").write_text(model_card(folder.name, record))


def to_hugging_face(tokenizer: Tokenizer) -> Any:
    """The tokenizer as transformers has them, with the same ids for every text. UserError where there is none."""
    from selmodel.huggingface import SelModelTokenizer

    if isinstance(tokenizer, SentencePieceTokenizer):
        return SelModelTokenizer(content=tokenizer.content)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _fast(tokenizer)
    raise UserError(
        f"a tokenizer of kind {type(tokenizer).__name__} has no Hugging Face form, so its model cannot be exported; "
        "expected a model trained on text"
    )


def _fast(tokenizer: HuggingFaceTokenizer) -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.bos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=eos, padding_side="left",
        split_special_tokens=True, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def describe(run: TrainedRun, dtype: str, pruning: Mapping[str, Any]) -> dict[str, Any]:
    """What the folder's record and model card say: plain values, and no path of this machine."""
    results = recorded_results(run.path, run.step)
    data = OmegaConf.to_container(run.config.data, resolve=True)
    optim = OmegaConf.to_container(run.config.optim, resolve=True)
    return {
        "step": run.step,
        "tokens": run.step * data["batch_size"] * data["context_length"],
        "dtype": dtype,
        "architecture": run.model.options(),
        "parameters": run.model.n_parameters()["total"],
        "training": {
            "source": data["source"]["_target_"].rpartition(".")[2],
            "batch_size": data["batch_size"],
            "context_length": data["context_length"],
            "document_mask": data["document_mask"],
            "seed": run.config.seed,
            "optimizer": optim.pop("_target_").rpartition(".")[2],
            **{name: value for name, value in optim.items() if isinstance(value, str | int | float | list)},
            "memory_loss_eps": run.model.memory_loss_eps,
        },
        "tokenizer": {"kind": type(run.tokenizer).__name__, "hash": run.tokenizer.hash},
        "validation": {name: x for name, x in results.get("validation", {}).items() if name != "loss_by_position"},
        "protocol": results.get("protocol"),
        "environment": run.environment,
        "budgets": dict(pruning) or None,
    }


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of ``folder`` when that is done; after an error nothing is left of it."""
    new = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    old = folder.parent / f".{folder.name}.{os.getpid()}.old"
    try:
        new.mkdir(parents=True)
        yield new
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    except OSError as error:
        raise UserError(
            f"export={folder}: cannot be written ({error.strerror or error}); choose another place"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bar of writing one file."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
