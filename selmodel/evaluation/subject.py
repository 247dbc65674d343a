"""What is evaluated: the model of a run, or any causal language model in Hugging Face's format, by one interface."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from selmodel.attention.cache import KVCache
from selmodel.budgets import Pruning, read_budgets
from selmodel.data.hub import from_hub
from selmodel.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from selmodel.errors import UserError
from selmodel.inference.generation import generate
from selmodel.training.loading import load_run

log = logging.getLogger(__name__)

FOREIGN = "hf:"
PRECISIONS = {
    "32-true": (torch.float32, None),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
}
EXPECTED = "hf:FOLDER or hf:NAME of a causal language model on the Hugging Face Hub, with safetensors weights"
LONGEST = 2048  # context of a foreign model that names none, or a longer one, unless context_length is given


@dataclass(frozen=True)
class Subject:
    """A model to evaluate and how to speak to it.

    Attributes:
        name: for messages and results: the checkpoint's path, or hf:NAME.
        tokenizer: texts to ids and back; its bos_id begins every input, its eos_id ends a document.
        context_length: the longest input in tokens.
        logits: tokens [b, n] int64 -> [b, n, vocabulary]; a token sees those before it alone, so rows may be filled
            up at the end with anything.
        continue_text: (ids, n_tokens) -> at most that many further ids, the likeliest each time, until EOS.
        folder: where results go unless the user says where.
        facts: what the results record of it: plain values.
    """

    name: str
    tokenizer: Tokenizer
    context_length: int
    logits: Callable[[Tensor], Tensor]
    continue_text: Callable[[Sequence[int], int], list[int]]
    folder: Path
    device: torch.device
    facts: dict[str, Any] = field(default_factory=dict)


def is_foreign(checkpoint: object) -> bool:
    """Whether ``checkpoint`` names a model in Hugging Face's format."""
    return str(checkpoint).startswith(FOREIGN)


def load_subject(cfg: DictConfig) -> Subject:
    """The model that ``cfg.checkpoint`` names, on the device of ``cfg.trainer``, in ``cfg.precision``.

    Raises:
        UserError: for a model that cannot be had or used, budgets of a foreign one, and an unknown precision.
    """
    device = choose_device(cfg.trainer.accelerator)
    if is_foreign(cfg.checkpoint):
        if cfg.budgets is not None:
            raise UserError(
                f"budgets={cfg.budgets} with checkpoint={cfg.checkpoint}: belong to models of train.py; leave them out"
            )
        return _foreign(cfg, device)
    return _trained(cfg, device)


def _trained(cfg: DictConfig, device: torch.device) -> Subject:
    run = load_run(cfg.checkpoint)
    run.check_on_text(f"suite={cfg.suite}")
    precision = cfg.precision or run.precision
    dtype, autocast = _arithmetic(precision)
    model = run.model.to(device, dtype).eval()
    budgets = OmegaConf.to_container(cfg.budgets) if OmegaConf.is_list(cfg.budgets) else cfg.budgets
    pruning = read_budgets(budgets, model, rule=cfg.rule, n_sinks=cfg.n_sinks)

    @torch.inference_mode()
    def logits(tokens: Tensor) -> Tensor:
        with _autocast(device, autocast):
            if pruning.budgets is None:
                return model(tokens).logits
            return model.pruned(tokens, **pruning.arguments()).logits

    def continue_text(ids: Sequence[int], n_tokens: int) -> list[int]:
        with _autocast(device, autocast):
            prompt = torch.tensor(ids, device=device)
            cache = _cache(model, pruning, min(len(ids) + n_tokens, model.context_length))
            found = generate(model, prompt, n_tokens, temperature=0, eos_id=run.tokenizer.eos_id, cache=cache)
        return found[len(ids) :].tolist()

    return Subject(
        name=str(run.path), tokenizer=run.tokenizer, context_length=model.context_length, logits=logits,
        continue_text=continue_text, folder=run.path.parent, device=device,
        facts={
            "checkpoint": run.path.name, "step": run.step, "precision": precision, "architecture": model.options(),
            "budgets": None if pruning.budgets is None else list(pruning.budgets), "rule": pruning.rule,
            "environment": run.environment,
        },
    )  # fmt: skip


def _cache(model: Any, pruning: Pruning, length: int) -> KVCache | bool:
    if pruning.budgets is None and not model.blocks[0].attention.supports_cache:
        return False
    return KVCache(model, 1, **pruning.arguments(), context_length=length)


def _foreign(cfg: DictConfig, device: torch.device) -> Subject:
    import transformers

    import selmodel.huggingface  # noqa: F401  so that exported models load too

    what = f"checkpoint={cfg.checkpoint}"
    name = str(cfg.checkpoint).removeprefix(FOREIGN)
    if name and Path(name).expanduser().is_dir():
        name = str(Path(name).expanduser())
    if not name:
        raise UserError(f"{what}: names no model; expected {EXPECTED}")
    precision = cfg.precision or "32-true"
    dtype, autocast = _arithmetic(precision)
    # Weights as safetensors and no code of the repository's: a stranger's model must not run anything here.
    safe = {"trust_remote_code": False}
    with _silent(transformers):
        loaded = from_hub(transformers.AutoTokenizer.from_pretrained, name, what, EXPECTED, **safe)
        model = from_hub(
            transformers.AutoModelForCausalLM.from_pretrained, name, what, EXPECTED, dtype=dtype, use_safetensors=True,
            **safe,
        )  # fmt: skip
    tokenizer = _tokenizer(loaded, what)
    model = model.to(device).eval()
    n_ids = model.get_input_embeddings().num_embeddings
    if max(tokenizer.bos_id, tokenizer.eos_id) >= n_ids:
        raise UserError(
            f"{what}: its tokenizer has ids beyond the model's {n_ids:,}; expected ones that belong together"
        )

    @torch.inference_mode()
    def logits(tokens: Tensor) -> Tensor:
        with _autocast(device, autocast):
            return model(tokens, use_cache=False).logits

    @torch.inference_mode()
    def continue_text(ids: Sequence[int], n_tokens: int) -> list[int]:
        prompt = torch.tensor(ids, device=device)[None]
        with _autocast(device, autocast):
            found = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n_tokens, do_sample=False,
                eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.eos_id,
            )  # fmt: skip
        new = found[0, len(ids) :].tolist()
        return new[: new.index(tokenizer.eos_id)] if tokenizer.eos_id in new else new

    known = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONGEST
    return Subject(
        name=f"{FOREIGN}{name}", tokenizer=tokenizer, context_length=known, logits=logits, continue_text=continue_text,
        folder=Path.cwd(), device=device,
        facts={
            "checkpoint": f"{FOREIGN}{Path(name).name if Path(name).is_dir() else name}",
            "revision": getattr(model.config, "_commit_hash", None), "model_type": model.config.model_type,
            "parameters": sum(parameter.numel() for parameter in model.parameters()), "precision": precision,
            "environment": {"transformers": transformers.__version__, "torch": torch.__version__},
        },
    )  # fmt: skip


def _tokenizer(loaded: Any, what: str) -> Tokenizer:
    """The tokenizer with the ids that the model knows: BOS or else EOS begins a text, EOS or else BOS ends one."""
    if hasattr(loaded, "training_tokenizer"):
        return loaded.training_tokenizer
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{what}: has no fast tokenizer (tokenizer.json), which says what bytes each token stands for")
    bos = loaded.bos_token_id if loaded.bos_token_id is not None else loaded.eos_token_id
    eos = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.bos_token_id
    if bos is None:
        raise UserError(f"{what}: its tokenizer has neither a BOS nor an EOS token to begin a text with")
    content = backend.to_str().encode()
    tokenizer = HuggingFaceTokenizer(content=content, bos_token=loaded.bos_token, eos_token=loaded.eos_token)
    # It would add a token of its own where there are no two; the model has no such id.
    tokenizer.bos_id, tokenizer.eos_id = bos, eos
    tokenizer.hash = hashlib.sha256(content).hexdigest()
    return tokenizer


def choose_device(accelerator: str) -> torch.device:
    """The device that ``trainer.accelerator`` asks for."""
    wanted = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda"}.get(accelerator)
    return torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))


def _arithmetic(precision: str) -> tuple[torch.dtype, torch.dtype | None]:
    """(type of the weights, type of the matrix products where it differs)."""
    precision = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}.get(str(precision), str(precision))
    if precision not in PRECISIONS:
        raise UserError(f"precision={precision}: expected one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def _autocast(device: torch.device, dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


class _silent:
    """Without progress bars and hints of transformers, which belong to training."""

    def __init__(self, transformers: Any) -> None:
        self.logging = transformers.utils.logging

    def __enter__(self) -> None:
        self.before = self.logging.get_verbosity(), self.logging.is_progress_bar_enabled()
        self.logging.set_verbosity_error()
        self.logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        self.logging.set_verbosity(self.before[0])
        if self.before[1]:
            self.logging.enable_progress_bar()
