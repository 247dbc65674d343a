"""Tasks of EleutherAI's lm-eval on a checkpoint: ``suite=hellaswag``, and any other by ``suite=lm_eval tasks=[...]``.

lm-eval brings the tasks, their prompts and their metrics; the model side is here, so that every input begins with one
``<BOS>`` as in training, and a run is scored as it is, without being exported.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from selmodel.config import did_you_mean
from selmodel.data.caching import write_atomically
from selmodel.errors import UserError
from selmodel.evaluation.subject import Subject, load_subject
from selmodel.naming import run_name
from selmodel.training.summary import to_json

try:
    import datasets
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise UserError(
        f"suite=hellaswag and suite=lm_eval need lm-eval ({error}): python -m pip install -e '.[eval]'"
    ) from error

log = logging.getLogger(__name__)

HELLASWAG = "hellaswag"
COLUMNS = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
SAY_EVERY = 30.0  # seconds between lines on how far scoring is
NEW_TOKENS = 256  # of tasks that ask for a text and do not say how long


class HarnessModel(TemplateLM):
    """A `Subject` as lm-eval asks models.

    Log-likelihoods do not depend on the batch but for the rounding of matrix products of other shapes: rows are filled
    up on the right, which nothing before sees. A text longer than the context loses its beginning, not its ``<BOS>``.

    subject: the model. batch_size: rows of one forward pass.
    """

    def __init__(self, subject: Subject, batch_size: int) -> None:
        super().__init__()
        self.subject, self.batch_size = subject, batch_size
        self.tokens = 0  # scored so far, contexts included
        self.cut = 0  # texts whose beginning did not fit
        self.seconds = 0.0

    @property
    def eot_token_id(self) -> int:
        return self.subject.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.subject.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.subject.tokenizer.hash

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids, behind the ``<BOS>`` unless add_special_tokens is False."""
        ids = self.subject.tokenizer.encode(string).tolist()
        return ids if add_special_tokens is False else [self.prefix_token_id, *ids]

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Without the progress bar of tokenizing, which is short."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list, **_: Any) -> list[tuple[float, bool]]:
        rows = [self._fit(context, continuation) for _, context, continuation in requests]
        # Rows of like length together, the longest first: if memory is short, it is so at once.
        order = sorted(range(len(rows)), key=lambda i: (-len(rows[i][0]), i))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        started = time.perf_counter()
        said = started
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for i, result in zip(batch, self._score([rows[i] for i in batch]), strict=True):
                results[i] = result
            now = time.perf_counter()
            if now - said > SAY_EVERY:
                said = now
                log.info("  %d of %d texts scored", start + len(batch), len(order))
        self.seconds += time.perf_counter() - started
        return results

    def _fit(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[list[int], int]:
        """(tokens, number of them at the end that are scored), where all but the last are what the model reads."""
        limit = self.subject.context_length + 1
        tokens = [*context, *continuation]
        scored = len(continuation)
        if len(tokens) > limit:
            self.cut += 1
            tokens = [tokens[0], *tokens[len(tokens) - limit + 1 :]]
            scored = min(scored, limit - 1)
        return tokens, scored

    def _score(self, rows: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """(sum of the log-probabilities in nats, whether each was the likeliest) of the ends of the rows."""
        width = max(len(tokens) for tokens, _ in rows) - 1
        padding = self.subject.tokenizer.eos_id
        inputs = torch.full((len(rows), width), padding, dtype=torch.int64)
        for i, (tokens, _) in enumerate(rows):
            inputs[i, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        self.tokens += sum(len(tokens) - 1 for tokens, _ in rows)
        logits = self.subject.logits(inputs.to(self.subject.device))
        return [_score_row(logits[i], tokens, scored) for i, (tokens, scored) in enumerate(rows)]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of the context, each behind a ``<BOS>``."""
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False), self.prefix_token_id,
                self.subject.context_length, 1,
            )  # fmt: skip
            pairs = [make_disjoint_window(window) for window in windows]
            # The window's first token is known from the last of the window before; a <BOS> takes its place.
            asked = [(None, [self.prefix_token_id], continuation) for _, continuation in pairs]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(asked)))
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """The likeliest continuations, up to the first of the strings that end one. Sampling is refused."""
        texts = []
        for request in requests:
            context, options = request.args
            if options.get("do_sample") and options.get("temperature", 1.0) > 0:
                raise UserError(
                    "a task asks for sampled text; expected one whose text is the likeliest (do_sample=false)"
                )
            until = options.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            n_tokens = min(int(options.get("max_gen_toks", NEW_TOKENS)), self.subject.context_length - 1)
            ids = self.tok_encode(context)
            room = self.subject.context_length - n_tokens
            if len(ids) > room:
                self.cut += 1
                ids = [ids[0], *ids[len(ids) - room + 1 :]]
            text = self.subject.tokenizer.decode(self.subject.continue_text(ids, n_tokens))
            texts.append(text[: min((text.index(end) for end in until if end and end in text), default=len(text))])
        return texts


def _score_row(logits: Tensor, tokens: list[int], scored: int) -> tuple[float, bool]:
    end = len(tokens) - 1
    if scored == 0:
        return 0.0, True
    log_probabilities = logits[end - scored : end].float().log_softmax(-1)
    targets = torch.tensor(tokens[-scored:], device=logits.device)
    total = log_probabilities.gather(1, targets[:, None]).double().sum().item()
    return total, bool((log_probabilities.argmax(-1) == targets).all())


def hellaswag(cfg: DictConfig) -> dict[str, Any]:
    """HellaSwag (Zellers et al., arXiv 1905.07830): of four endings the likeliest is the answer; chance is 0.25.

    ``acc_norm`` divides each ending's log-probability by its length in characters.
    """
    check(cfg)
    if cfg.hellaswag.path is None:
        return run_tasks(cfg, [HELLASWAG], [HELLASWAG])
    with _local_hellaswag(Path(str(cfg.hellaswag.path)).expanduser()) as task:
        return run_tasks(cfg, [HELLASWAG], [task])


def lm_eval_tasks(cfg: DictConfig) -> dict[str, Any]:
    """The tasks of lm-eval that ``cfg.tasks`` names."""
    check(cfg)
    tasks = [cfg.tasks] if isinstance(cfg.tasks, str) else list(cfg.tasks or [])
    if not tasks:
        raise UserError("tasks: not given; expected tasks=[NAME,...] of lm-eval, such as tasks=[lambada_openai,piqa]")
    known = _tasks().all_tasks
    faults = [
        f"tasks={task}: lm-eval knows no such task{did_you_mean(str(task), known)} (it has {len(known):,}; "
        "lm-eval ls tasks lists them)"
        for task in tasks
        if task not in known
    ]
    if faults:
        raise UserError("\n".join(faults))
    return run_tasks(cfg, tasks, tasks)


def check(cfg: DictConfig) -> None:
    """Refuse options that are out of range. Raises UserError, with all faults in one message."""
    faults = []
    for name, least in (("batch_size", 1), ("num_fewshot", 0), ("limit", 1)):
        value = cfg[name]
        if value is None and name != "batch_size":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            faults.append(f"{name}={value}: expected a whole number of at least {least}")
    if faults:
        raise UserError("\n".join(faults))


def run_tasks(cfg: DictConfig, names: list[str], tasks: list[Any]) -> dict[str, Any]:
    """Load the model, run the tasks, print a table and write the figures."""
    import_evaluate()
    subject = load_subject(cfg)
    if cfg.limit is not None:
        log.warning("limit=%d: the first of each task alone; for trying out, not to be compared", cfg.limit)
    model = HarnessModel(subject, cfg.batch_size)
    started = time.perf_counter()
    with _quiet():
        found = _evaluate(model, tasks, cfg, names)
    seconds = time.perf_counter() - started
    rows = _rows(found)
    results = {
        **subject.facts,
        "results": rows,
        "protocol": {
            "lm_eval": lm_eval.__version__, "versions": found["versions"], "num_fewshot": found["n-shot"],
            "limit": cfg.limit, "batch_size": cfg.batch_size, "context_length": subject.context_length,
            "tokenizer_hash": subject.tokenizer.hash, "texts_cut": model.cut,
        },
        "tokens": model.tokens,
        "seconds": seconds,
    }  # fmt: skip
    output = _output(cfg, subject, names)
    write_atomically(output, to_json(results))
    for line in (subject.name, *_table(rows)):
        log.info(line)
    if model.tokens:
        log.info(
            "  speed                %s tokens/s in scoring (%s tokens; %.1f s in all)",
            f"{model.tokens / max(model.seconds, 1e-9):,.0f}", f"{model.tokens:,}", seconds,
        )  # fmt: skip
    if model.cut:
        log.info("  cut                  %d texts longer than the context of %d lost their beginning", model.cut,
                 subject.context_length)  # fmt: skip
    log.info("  written to           %s", output)
    return results


def _evaluate(model: HarnessModel, tasks: list[Any], cfg: DictConfig, names: list[str]) -> dict[str, Any]:
    try:
        return lm_eval.simple_evaluate(
            model,
            tasks=tasks,
            task_manager=_tasks(),
            num_fewshot=cfg.num_fewshot,
            limit=cfg.limit,
            bootstrap_iters=1000,
            log_samples=False,
        )
    except UserError:
        raise
    except Exception as error:
        # What a data set's download raises: many kinds, of several libraries.
        origin = type(error).__module__.split(".")[0]
        if not isinstance(error, OSError) and origin not in ("datasets", "huggingface_hub", "httpx", "requests"):
            raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"the data of {', '.join(names)} cannot be had: {reason}. Without a network, suite=hellaswag takes "
            "hellaswag.path=DIR, a folder that python data/hellaswag.py DIR makes"
        ) from error


def import_evaluate() -> Any:
    """The package evaluate, which some of lm-eval's metrics import; a script of that name lies beside this project."""
    root = Path(__file__).resolve().parents[2]
    path = list(sys.path)
    sys.path[:] = [place for place in path if Path(place or ".").resolve() != root]
    try:
        return importlib.import_module("evaluate")
    finally:
        sys.path[:] = path


@functools.cache
def _tasks() -> TaskManager:
    """lm-eval's list of its tasks, which takes seconds to make."""
    return TaskManager()


@contextmanager
def _local_hellaswag(path: Path) -> Iterator[Any]:
    """lm-eval's own task, on the validation split of a folder saved by ``datasets``.

    Raises:
        UserError: where the folder is no such data set.
    """
    expected = "expected a folder saved by datasets with HellaSwag's validation split (python data/hellaswag.py DIR)"
    places = (path, path / "validation", path / "none" / "validation")
    found = next(
        (one for one in places if (one / "state.json").is_file() or (one / "dataset_dict.json").is_file()), None
    )
    if found is None:
        raise UserError(f"hellaswag.path={path}: holds no data set; {expected}")
    try:
        data = datasets.load_from_disk(str(found))
    except Exception as error:  # of several libraries, by what is damaged
        raise UserError(f"hellaswag.path={path}: cannot be read ({error}); {expected}") from error
    if isinstance(data, datasets.DatasetDict):
        if "validation" not in data:
            raise UserError(f"hellaswag.path={path}: has no split validation, only {', '.join(data)}; {expected}")
        data = data["validation"]
    missing = [name for name in COLUMNS if name not in data.column_names]
    if missing or not len(data):
        fault = f"lacks {', '.join(missing)}" if missing else "is empty"
        raise UserError(f"hellaswag.path={path}: {fault}; {expected}")
    # lm-eval loads tasks from files, which may include others; this one differs in where the data is.
    with tempfile.TemporaryDirectory() as folder, _quiet():
        manager = _tasks()
        task = Path(folder) / f"{HELLASWAG}.yaml"
        files = {"validation": [file["filename"] for file in data.cache_files]}
        differing = {
            "include": str(manager.task_index[HELLASWAG].yaml_path), "training_split": None, "dataset_path": "arrow",
            "dataset_kwargs": {"data_files": files, "cache_dir": folder},
        }  # fmt: skip
        task.write_text(json.dumps(differing))
        yield manager.load([str(task)])["tasks"][HELLASWAG]


def _rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per task and metric: {task, metric, value, stderr, n}."""
    rows = []
    for task, figures in found["results"].items():
        n = found.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in figures.items():
            metric, comma, which = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = figures.get(f"{metric}_stderr,{which}")
            name = metric if which == "none" else f"{metric} ({which})"
            stderr = float(stderr) if isinstance(stderr, int | float) else None
            rows.append({"task": task, "metric": name, "value": value, "stderr": stderr, "n": n})
    return rows


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"  {'task':<20} {'metric':<16} {'value':>8} {'stderr':>8} {'examples':>9}"]
    for row in rows:
        value = f"{row['value']:.4f}" if isinstance(row["value"], float) else str(row["value"])
        stderr = "" if row["stderr"] is None or math.isnan(row["stderr"]) else f"{row['stderr']:.4f}"
        examples = "" if row["n"] is None else f"{row['n']:,}"
        lines.append(f"  {row['task']:<20} {row['metric']:<16} {value:>8} {stderr:>8} {examples:>9}".rstrip())
    return lines


def _output(cfg: DictConfig, subject: Subject, names: list[str]) -> Path:
    if cfg.output:
        return Path(cfg.output).expanduser()
    asked = {"num_fewshot": cfg.num_fewshot, "limit": cfg.limit, "precision": cfg.precision, "rule": cfg.rule}
    if cfg.budgets is not None:
        asked["budgets"] = OmegaConf.to_container(cfg.budgets) if OmegaConf.is_list(cfg.budgets) else cfg.budgets
    options = [f"{name}={value}" for name, value in asked.items() if value is not None]
    suffix = f"+{run_name(options)}" if options else ""
    model = Path(subject.facts["checkpoint"]).stem if "step" in subject.facts else subject.facts["checkpoint"]
    model = model.replace("/", "-").replace(":", "-")
    return subject.folder / f"{'-'.join(names)[:80]}-{model}{suffix}.json"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and hints of lm-eval and datasets."""
    datasets.disable_progress_bars()
    harness = logging.getLogger("lm_eval")
    before = harness.level, lm_eval.api.task.tqdm
    harness.setLevel(logging.ERROR)
    lm_eval.api.task.tqdm = lambda iterable, **_: iterable  # of making prompts, which is short
    try:
        yield
    finally:
        harness.setLevel(before[0])
        lm_eval.api.task.tqdm = before[1]
        datasets.enable_progress_bars()
