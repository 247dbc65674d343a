"""``generate.py``: text from a checkpoint, as it is sampled, and what it cost."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from omegaconf import DictConfig, OmegaConf

from selmodel.attention.cache import KVCache
from selmodel.budgets import Pruning, read_budgets
from selmodel.config import check_options
from selmodel.errors import UserError
from selmodel.inference.generation import generate, sampling_faults
from selmodel.inference.text import TextStream
from selmodel.training.loading import TrainedRun, load_run

log = logging.getLogger(__name__)

GENERATE_KEYS = (
    "checkpoint", "prompt", "tokens", "temperature", "top_p", "top_k", "seed", "budgets", "rule", "n_sinks", "cache",
    "device", "dtype",
)  # fmt: skip
RECODE = "expected UTF-8 text; iconv changes the encoding of a file"
INTERRUPTED = 130  # exit status of a process that Ctrl-C ended, as shells give it
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Figures:
    """What a generation cost.

    Attributes:
        prompt_tokens, new_tokens: ``<BOS>`` counts as one of the prompt.
        context_length: of the model.
        prefill_seconds: from the start to the first token sampled, <EOS> included.
        decode_seconds: from there to the last new token.
        ending: why it ended.
        cache_bytes: allocated by the cache; None without one.
        unpruned_bytes: what a cache without budgets would have allocated; None where there are no budgets.
        memory_factor: of the budgets at the context, 1 without.
    """

    prompt_tokens: int
    context_length: int
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    ending: str = ""
    cache_bytes: int | None = None
    unpruned_bytes: int | None = None
    memory_factor: float = 1.0
    _since: float = 0.0

    def start(self) -> None:
        """The clock of the prompt begins to run."""
        self._since = time.perf_counter()

    def count(self) -> None:
        """One more token is there."""
        now = time.perf_counter()
        self.new_tokens += 1
        if self.new_tokens == 1:
            self.prefill_seconds, self._since = now - self._since, now
        else:
            self.decode_seconds = now - self._since

    def finish(self, ending: str) -> None:
        """Nothing more comes; where nothing came, because the first token was <EOS> or the context was full."""
        if self.new_tokens == 0 and self.prompt_tokens < self.context_length:
            self.prefill_seconds = time.perf_counter() - self._since
        self.ending = ending

    def lines(self) -> list[str]:
        """The figures for a person."""
        lines = [f"prompt       {self.prompt_tokens:,} token{'s' * (self.prompt_tokens != 1)}"]
        if self.prefill_seconds:
            speed = self.prompt_tokens / self.prefill_seconds
            lines[0] += f" in {self.prefill_seconds:.3f} s, {speed:,.0f} tokens/s, with sampling the first new one"
        lines.append(f"new          {self.new_tokens:,} token{'s' * (self.new_tokens != 1)}")
        if self.decode_seconds:
            speed = (self.new_tokens - 1) / self.decode_seconds
            lines[1] += f", {speed:,.1f} tokens/s after the first"
        lines[1] += f"; ended by {self.ending}"
        if self.cache_bytes is None:
            lines.append("cache        none: every token cost a pass over all before it")
        else:
            lines.append(f"cache        {self.cache_bytes:,} bytes")
            if self.unpruned_bytes is not None:
                lines[2] += (
                    f", without budgets {self.unpruned_bytes:,}; memory factor {self.memory_factor:.1f} at the full "
                    f"context of {self.context_length:,}"
                )
        return lines


def generate_text(cfg: DictConfig) -> str:
    """Continue ``cfg.prompt`` by the model of ``cfg.checkpoint`` (``configs/generate.yaml``).

    The text goes to standard output as it is sampled, and nothing else does; figures go to the log.

    Returns:
        prompt and continuation.

    Raises:
        UserError: for every option that is out of range or does not fit the checkpoint, before anything is written;
            and for logits that are not finite, when they come.
    """
    try:
        return _generate(cfg)
    except KeyboardInterrupt:  # while reading or loading; _stream answers the later ones
        log.info("stopped by Ctrl-C before there was a text")
        sys.exit(INTERRUPTED)


def _generate(cfg: DictConfig) -> str:
    _check(cfg)
    device = _device(cfg.device)
    text = _prompt(cfg)
    run = load_run(cfg.checkpoint)
    model = run.model.to(device, DTYPES[cfg.dtype])
    budgets = OmegaConf.to_container(cfg.budgets) if OmegaConf.is_list(cfg.budgets) else cfg.budgets
    pruning = read_budgets(budgets, model, rule=cfg.rule, n_sinks=cfg.n_sinks)
    if cfg.n_sinks is not None and pruning.rule != "oldest":
        raise UserError(f"n_sinks={cfg.n_sinks}: belongs to rule=oldest with budgets; leave it out, or set both")
    ids = [run.tokenizer.bos_id, *run.tokenizer.encode(text).tolist()]
    if len(ids) > model.context_length:
        raise UserError(
            f"prompt: has {len(ids):,} tokens with <BOS>, and the model's context is {model.context_length:,}; "
            "expected a shorter text, or the checkpoint of a model with a longer model.context_length"
        )
    return _stream(cfg, run, pruning, ids, device)


def _stream(cfg: DictConfig, run: TrainedRun, pruning: Pruning, ids: list[int], device: torch.device) -> str:
    model, tokenizer = run.model, run.tokenizer
    length = min(len(ids) + cfg.tokens, model.context_length)
    pruned = pruning.budgets is not None
    figures = Figures(len(ids), model.context_length, memory_factor=pruning.memory_factor(model.context_length))
    cache = None
    if cfg.cache and (pruned or model.blocks[0].attention.supports_cache):
        cache = KVCache(model, 1, **pruning.arguments(), context_length=length)
        figures.cache_bytes = cache.nbytes
        if pruned:
            figures.unpruned_bytes = KVCache(model, 1, context_length=length, device="meta").nbytes
    log.info("%s, step %d, seed %d", run.path, run.step, cfg.seed)
    if hasattr(sys.stdout, "reconfigure"):
        # A character that a terminal of another encoding than UTF-8 lacks must not end the text.
        sys.stdout.reconfigure(errors="backslashreplace")
    pieces: list[str] = []
    stream = TextStream(tokenizer)

    def show(piece: str) -> None:
        if piece:
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()

    def on_token(token: int) -> None:
        figures.count()
        show(stream.push(token))

    stopped = None
    try:
        show(stream.push(*ids))
        figures.start()
        tokens = generate(
            model, torch.tensor(ids, device=device), cfg.tokens, temperature=cfg.temperature, top_p=cfg.top_p,
            top_k=cfg.top_k, eos_id=tokenizer.eos_id, generator=torch.Generator(device).manual_seed(cfg.seed),
            cache=cache or False, on_token=on_token,
        )  # fmt: skip
        figures.finish(_ending(len(tokens) - len(ids), len(tokens), cfg.tokens, model.context_length))
        show(stream.flush() + "\n")
    except KeyboardInterrupt:
        stopped = INTERRUPTED
        figures.ending = "Ctrl-C"
        with _reader_may_leave():
            show(stream.flush() + "\n")
    except UserError:
        with _reader_may_leave():
            show("\n")
        raise
    except BrokenPipeError:  # whoever read the text has what they wanted
        stopped = 0
        figures.ending = "the reader of the text"
        _close_output()
    for line in ("", *figures.lines()):
        log.info(line)
    if stopped is not None:
        sys.exit(stopped)
    return "".join(pieces).removesuffix("\n")


def _ending(new: int, length: int, asked: int, context_length: int) -> str:
    if new == asked:
        return f"tokens={asked}"
    if length == context_length:
        return f"the context of {context_length:,} tokens"
    return "<EOS>"


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Let a reader leave: ``| head`` gets the Ctrl-C of its terminal too."""
    try:
        yield
    except BrokenPipeError:
        _close_output()


def _close_output() -> None:
    """Point standard output elsewhere, so that Python does not fail when it flushes it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check(cfg: DictConfig) -> None:
    check_options(cfg, GENERATE_KEYS)
    faults = _type_faults(cfg)
    if cfg.checkpoint is None:
        faults.append("checkpoint: not given; expected checkpoint=RUN/last.ckpt or the folder of a run")
    if cfg.prompt is None:
        faults.append('prompt: not given; expected prompt="a text", prompt=- to read it, or prompt= for none')
    if not faults:
        faults += sampling_faults(cfg.temperature, cfg.top_p, cfg.top_k)
        if cfg.tokens < 1:
            faults.append(f"tokens={cfg.tokens}: must be at least 1")
        if not 0 <= cfg.seed < 2**63:
            faults.append(f"seed={cfg.seed}: must be from 0 to {2**63 - 1}")
        if cfg.dtype not in DTYPES:
            faults.append(f"dtype={cfg.dtype}: must be one of {', '.join(DTYPES)}")
        if not cfg.cache and cfg.budgets is not None:
            faults.append(f"budgets={cfg.budgets} with cache=false: only a cache can let go of keys; leave it on")
    if faults:
        raise UserError("\n".join(faults))


def _type_faults(cfg: DictConfig) -> list[str]:
    def is_int(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    def is_number(value: object) -> bool:
        return is_int(value) or isinstance(value, float)

    checks = {
        "checkpoint": (lambda value: value is None or isinstance(value, str), "a file, or the folder of a run"),
        "tokens": (is_int, "a whole number"),
        "temperature": (is_number, "a number"),
        "top_p": (is_number, "a number"),
        "top_k": (lambda value: value is None or is_int(value), "a whole number or null"),
        "seed": (is_int, "a whole number"),
        "cache": (lambda value: isinstance(value, bool), "true or false"),
        "n_sinks": (lambda value: value is None or is_int(value), "a whole number or null"),
    }
    return [f"{name}={cfg[name]}: expected {words}" for name, (good, words) in checks.items() if not good(cfg[name])]


def _device(name: object) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    expected = "expected auto, cpu, cuda or cuda:N"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(name)):
        raise UserError(f"device={name}: no such device; {expected}")
    try:
        device = torch.device(str(name))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"device={name}: cannot be used ({reason}); {expected}") from error
    return device


def _prompt(cfg: DictConfig) -> str:
    """The text to begin with; ``-`` reads it from standard input, as it is but for one line end at its end."""
    text = str(cfg.prompt)
    if text != "-":
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"prompt: is not UTF-8 at character {error.start}; {RECODE}") from error
        return text
    if sys.stdin.isatty():
        log.info("the prompt, ended by Ctrl-D:")
    content = sys.stdin.buffer.read()  # as bytes, for sys.stdin changes line ends and bytes that are no text
    if not content:
        raise UserError("prompt=-: standard input is empty; expected a text there, or prompt= for none")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02X} at {error.start}"
        raise UserError(f"prompt=-: standard input is not UTF-8 ({byte}); {RECODE}") from error
    return re.sub(r"\r?\n\Z", "", text)
