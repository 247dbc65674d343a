"""From a composed configuration to its checked parts: data, network, trainer."""

from __future__ import annotations

import warnings

import lightning as L
import torch
from omegaconf import DictConfig

from selmodel.config import build, check_options, check_scalars, plain
from selmodel.data.datamodule import DataModule
from selmodel.data.sources import Source
from selmodel.data.tasks import Task
from selmodel.data.tokenizer import Tokenizer
from selmodel.errors import UserError
from selmodel.training.checkpoint_file import AtomicCheckpointIO
from selmodel.training.cluster import check_tasks, cluster_environment
from selmodel.training.module import check_micro_batch_tokens

# What may be set of lightning.Trainer. The rest is either done by this project's own parts or would change what a
# step, a validation or a run is without its being said.
TRAINER_OPTIONS = (
    "accelerator", "strategy", "devices", "num_nodes", "precision", "max_steps", "val_check_interval",
    "log_every_n_steps", "deterministic", "benchmark", "detect_anomaly",
)  # fmt: skip
_INSTEAD = {
    "accumulate_grad_batches": "micro_batch_tokens cuts the batch into passes that fit",
    "gradient_clip_val": "set optim.gradient_clip",
    "gradient_clip_algorithm": "set optim.gradient_clip",
    "max_epochs": "set trainer.max_steps",
    "min_steps": "set trainer.max_steps",
    "limit_val_batches": "set data.validation_sequences",
    "limit_train_batches": "set trainer.max_steps",
    "fast_dev_run": "set trainer.max_steps=2 and another run_dir",
    "callbacks": "add entries to the group callbacks",
    "logger": "choose logger=csv or logger=wandb",
    "enable_progress_bar": "set callbacks.progress.bar",
    "enable_checkpointing": "set callbacks.checkpoint.every_n_steps",
}
_SCALARS = {"seed": (int,), "micro_batch_tokens": (int, type(None)), "compile": (bool,), "plan": (bool,)}
_GROUPS = ("attention", "model", "data", "tokenizer", "optim", "trainer", "logger", "callbacks")
_ENTRIES = {"logger": ("wandb",), "callbacks": None}  # names that a group of nodes may have; None: any


def check_config(cfg: DictConfig) -> None:
    """Everything that can be known to be wrong before a file is read, all faults in one message.

    Raises:
        UserError: with every fault found.
    """
    faults = [
        f"{name}={cfg[name]}: a group cannot be left out (python train.py --help lists its choices)"
        for name in _GROUPS
        if not isinstance(cfg[name], DictConfig)
    ]
    if faults:
        raise UserError("\n".join(faults))
    check_options(cfg)
    faults = check_scalars(cfg, _SCALARS) + _entry_faults(cfg)
    if not faults and not 0 <= cfg.seed < 2**32:
        faults.append(f"seed={cfg.seed}: must be from 0 to {2**32 - 1}")
    vocab_size = cfg.tokenizer.get("vocab_size") or 2
    checks = (
        lambda: check_micro_batch_tokens(cfg.micro_batch_tokens),
        lambda: check_trainer(plain(cfg.trainer)),
        lambda: build(cfg.optim),
        lambda: _check_model(cfg, vocab_size),
        lambda: build(cfg.data, source=_task(cfg), tokenizer=None),
        lambda: build(cfg.data.source),
        lambda: build(cfg.tokenizer),
        lambda: build(cfg.callbacks.checkpoint, directory=".", identity=dict),
        lambda: cfg.callbacks.get("progress") and build(cfg.callbacks.progress),
        lambda: build(cfg.guards),
        lambda: cfg.sample is not None and build(cfg.sample),
    )
    for check in checks if not faults else ():
        try:
            check()
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("\n".join(faults))


def _task(cfg: DictConfig) -> Task | None:
    """The synthetic task of the data, whose lengths the context must hold; None for a corpus."""
    try:
        source = build(cfg.data.source)
    except UserError:  # has a check of its own
        return None
    return source if isinstance(source, Task) else None


def _entry_faults(cfg: DictConfig) -> list[str]:
    """Entries of the groups that hold several components, which must name what they are."""
    faults = []
    for group, names in _ENTRIES.items():
        for name, node in cfg[group].items():
            if names is not None and name not in names:
                faults.append(f"{group}.{name}: no such entry (expected one of {', '.join(names)})")
            elif node is not None and not (isinstance(node, DictConfig) and "_target_" in node):
                faults.append(f"{group}.{name}={node}: expected null or a component with a _target_")
    if cfg.callbacks.get("checkpoint") is None:
        faults.append(
            "callbacks.checkpoint=null: needed; callbacks.checkpoint.every_n_steps=0 writes one at the end only"
        )
    return faults


def _check_model(cfg: DictConfig, vocab_size: int) -> None:
    with torch.device("meta"):  # no memory, no initial values
        build(cfg.model, attention=build(cfg.attention), vocab_size=vocab_size)


def check_trainer(options: dict) -> None:
    """Refuse trainer options that would silently do nothing here, or count something other than optimizer steps."""
    faults = []
    for name, value in options.items():
        if name not in TRAINER_OPTIONS and not name.startswith("_"):
            instead = _INSTEAD.get(name, f"of lightning.Trainer's options these are: {', '.join(TRAINER_OPTIONS)}")
            faults.append(f"trainer.{name}={value}: not used here; {instead}")
    if options.get("precision") in ("bf16-true", "16-true"):
        faults.append(
            f"trainer.precision={options['precision']}: weights in half precision stop moving when a step is less than "
            "their rounding (1 part in 256 for bfloat16); expected auto, 32-true, or bf16-mixed, which computes in "
            "half precision and keeps weights and moments in float32"
        )
    for name in ("max_steps", "val_check_interval", "log_every_n_steps"):
        value = options.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            faults.append(f"trainer.{name}={value}: must be a whole number of optimizer steps, at least 1")
    if faults:
        raise UserError("\n".join(faults))


def build_corpus(cfg: DictConfig) -> tuple[Source, Tokenizer]:
    """The corpus, ready to be read, and its tokenizer, trained first when its file is missing."""
    source = build(cfg.data.source)
    source.prepare()
    return source, build(cfg.tokenizer).build(source, cfg.cache_dir)


def build_data(cfg: DictConfig) -> tuple[Tokenizer, DataModule]:
    """The tokenizer and the data module that ``cfg`` describes."""
    source, tokenizer = build_corpus(cfg)
    return tokenizer, build(cfg.data, source=source, tokenizer=tokenizer)


def build_model(cfg: DictConfig, tokenizer: Tokenizer):
    """The network of ``cfg``, its weights initialised from ``cfg.seed``."""
    model = build(cfg.model, attention=build(cfg.attention), vocab_size=tokenizer.vocab_size)
    model.init_weights(cfg.seed)
    return model


def build_trainer(cfg: DictConfig, *, callbacks: list, loggers: list) -> L.Trainer:
    """A Lightning trainer from ``cfg.trainer`` with what this project's module and data need.

    Raises:
        UserError: for options that do not fit each other or the machine.
    """
    options = plain(cfg.trainer)
    options["precision"] = resolve_precision(options)
    options |= {
        "max_epochs": -1,  # the training stream has no end
        "check_val_every_n_epoch": None,  # steps alone count
        "use_distributed_sampler": False,  # the data module shares the sequences out
        "enable_checkpointing": False,  # CheckpointWriter does it
        "enable_progress_bar": False,  # Progress does it
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": callbacks,
        "logger": loggers,
        "plugins": [AtomicCheckpointIO()],
    }
    environment = cluster_environment()
    options["plugins"].append(environment)
    # That is decided. Lightning still asks once, for checkpoints of its own requeueing, and warns where srun is there.
    warnings.filterwarnings("ignore", message="The `srun` command is available")
    if fault := check_tasks(environment, devices=count_devices(options), num_nodes=options.get("num_nodes") or 1):
        raise UserError(fault)
    options.pop("_target_", None)
    if isinstance(options.get("strategy"), dict):
        filled = {}
        if options["strategy"].get("data_parallel_size", 0) is None:  # Lightning's own "auto" counts nodes alone
            filled["data_parallel_size"] = count_devices(options) * int(options.get("num_nodes") or 1)
        options["strategy"] = build(cfg.trainer.strategy, **filled)
    try:
        return L.Trainer(**options)
    except Exception as error:  # of many kinds; each says which option does not fit
        raise UserError(f"trainer: {error}") from error


def count_devices(options: dict) -> int:
    """Devices of one node that the trainer's options ask for."""
    devices = options.get("devices", "auto")
    if devices in ("auto", -1, "-1", None):
        on_gpu = options.get("accelerator", "auto") in ("auto", "gpu", "cuda")
        return max(1, torch.cuda.device_count()) if on_gpu else 1
    if isinstance(devices, list | tuple):
        return len(devices)
    return len(devices.split(",")) if isinstance(devices, str) else int(devices)


def resolve_precision(options: dict) -> str | None:
    """``precision`` of the trainer's options, with ``auto`` made definite for this machine."""
    if options.get("precision") != "auto":
        return options.get("precision")
    on_gpu = options.get("accelerator", "auto") in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"
