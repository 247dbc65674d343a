"""``suite=budget_search``: budgets that bring a selective model to a standard model's perplexity, as a file.

Budgets are searched on the first part of the validation set, and what they are worth is reported on the rest, which
the search has not seen. The search writes what it has reached after every round, so the same command goes on with it.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from omegaconf import DictConfig
from tqdm import tqdm

from selmodel.attention.pruning import LEAST_BUDGET
from selmodel.budgets import FORMAT, memory_factor, read_budgets
from selmodel.comparing import differences
from selmodel.data.caching import write_atomically
from selmodel.data.validation import ValidationLoader, ValidationSet
from selmodel.errors import UserError
from selmodel.evaluation.budget_search import LayeredLoss, Round, loss_under, search_budgets, search_steps
from selmodel.evaluation.perplexity import ValidationResult
from selmodel.evaluation.pruning import plain_budgets, pruning_data
from selmodel.evaluation.setup import evaluation_trainer, output_path
from selmodel.training.interrupt import Interrupted
from selmodel.training.loading import TrainedRun, load_run
from selmodel.training.summary import to_json

log = logging.getLogger(__name__)

SCHEDULES = ("greedy", "halving")
LINE_SECONDS = 10.0  # between two lines of progress where no bar can be shown


@dataclass(frozen=True)
class Search:
    """Options of the search (config ``search``).

    Attributes:
        target: the perplexity to stay at on the sequences searched on: a number, or the checkpoint of a standard
            model, whose perplexity on the same sequences it then is.
        increase: instead of a target, by how much the model's own perplexity may grow: 0.01 allows 1 percent.
        step: C, the tokens that a round lowers one layer by; the paper's is 8.
        schedule: ``greedy``, as in the paper, or ``halving``: the same with larger steps first, in fewer rounds.
        sequences: of the validation set, its first ones, to search on. The rest is for the report.

    Raises:
        UserError: naming each option that is out of range.
    """

    target: float | str | None = None
    increase: float | None = None
    step: int = 8
    schedule: str = "greedy"
    sequences: int = 64

    def __post_init__(self) -> None:
        faults = []
        if self.target in (None, "") and self.increase is None:
            faults.append(
                "search.target: not given; expected a perplexity, the checkpoint of a standard model to match, or "
                "search.increase=0.01 (what the model's own perplexity may grow by)"
            )
        elif self.target is not None and self.increase is not None:
            faults.append(f"search.target={self.target} beside search.increase={self.increase}: give one of them")
        elif self.increase is not None and not (_is_number(self.increase) and 0 <= self.increase < math.inf):
            faults.append(f"search.increase={self.increase}: expected 0 or more, such as 0.01 for 1 percent")
        elif _is_number(self.target) and not 1 <= self.target < math.inf:
            faults.append(f"search.target={self.target}: a perplexity is 1 or more")
        for name in ("step", "sequences"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                faults.append(f"search.{name}={value}: expected an integer of at least 1")
        if self.schedule not in SCHEDULES:
            faults.append(f"search.schedule={self.schedule}: expected one of {', '.join(SCHEDULES)}")
        if faults:
            raise UserError("\n".join(faults))

    def changed(self) -> dict[str, Any]:
        """The options that are not at their default, under the names typed."""
        return {
            f"search.{field.name}": getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }


def budget_search(cfg: DictConfig) -> dict[str, Any]:
    """Search budgets for ``cfg.checkpoint`` at ``cfg.search.target`` and write them.

    ``cfg.budgets``, where given, are those to begin with; otherwise every layer begins with the whole context.

    Returns:
        the content of the file, which ``budgets=FILE`` of evaluation and generation accept.

    Raises:
        UserError: for options that do not fit, a target that the model does not reach without budgets, and a file of
            another search in the way.
        Interrupted: when stopped; the same command goes on.
    """
    options = Search(**{str(key): cfg.search[key] for key in cfg.search})
    run = load_run(cfg.checkpoint)
    n = run.model.context_length
    begin = n if cfg.budgets is None else plain_budgets(cfg.budgets)
    chosen = read_budgets(begin, run.model, rule=cfg.rule, n_sinks=cfg.n_sinks)
    other = load_run(options.target) if isinstance(options.target, str) else None
    if other is not None:
        _check_comparable(run, other)
    data = pruning_data(cfg, run)
    data.setup("validate")
    seen, unseen = _parts(data.validation_set, options.sequences)
    parts = {"searched_on": ValidationLoader(seen, data.validation_batch_size)}
    parts["unseen"] = ValidationLoader(unseen, data.validation_batch_size)
    trainer = evaluation_trainer(cfg, run)
    if trainer.world_size > 1:
        raise UserError(f"trainer.devices={cfg.trainer.devices}: the search runs on one device; set trainer.devices=1")
    output = output_path(
        cfg, run.path, "budgets", **options.changed(), budgets=cfg.budgets, rule=cfg.rule, n_sinks=cfg.n_sinks
    )
    identity = {
        "rule": chosen.rule,
        "n_sinks": chosen.n_sinks,
        "context_length": n,
        "begin": [min(budget, n) for budget in chosen.budgets],
        "search": asdict(options),
        "checkpoint": run.path.name,
        "step": run.step,
        "architecture": run.model.options(),
        "protocol": data.protocol() | {"precision": cfg.trainer.precision},
        "environment": run.environment,
    }
    if output.exists():
        return _finished(output, identity)

    precision = trainer.strategy.precision_plugin.forward_context
    pruning = {"rule": chosen.rule, "n_sinks": chosen.n_sinks, "precision": precision}
    with _placed(trainer, run), _placed(trainer, other):
        whole = [n] * run.model.n_layers
        unpruned = {name: loss_under(run.model, part, whole, **pruning) for name, part in parts.items()}
        if other is not None:
            targets = {name: loss_under(other.model, part, precision=precision).loss for name, part in parts.items()}
        elif options.increase is not None:
            targets = {name: result.loss + math.log1p(options.increase) for name, result in unpruned.items()}
        else:
            targets = {"searched_on": math.log(options.target), "unseen": None}
        log.info("%s, step %d", run.path, run.step)
        log.info(
            "searching on %d sequences: perplexity %.2f without budgets, target %.2f",
            seen.n_sequences, unpruned["searched_on"].perplexity, math.exp(targets["searched_on"]),
        )  # fmt: skip
        partial = output.with_name(f"{output.stem}.partial.json")
        rounds = _rounds_so_far(partial, identity)
        loss, ended = _search(run, parts["searched_on"], targets["searched_on"], identity, rounds, partial, precision)
        pruned = {"searched_on": loss.result, "unseen": loss_under(run.model, parts["unseen"], loss.budgets, **pruning)}

    content = {
        "format": FORMAT,
        "budgets": loss.budgets,
        "memory_factor": memory_factor(loss.budgets, n, run.model.n_layers),
        "perplexity": pruned["unseen"].perplexity,
        **identity,
        "ended": ended,
        **{name: _figures(pruned[name], unpruned[name], targets[name]) for name in parts},
        "rounds": [asdict(one) for one in rounds],
    }
    write_atomically(output, to_json(content))
    partial.unlink(missing_ok=True)
    _add_to_wandb(run, output)
    for line in _lines(content, output):
        log.info(line)
    return content


def _add_to_wandb(run: TrainedRun, output: Path) -> None:
    """Keep the budgets with the run at Weights & Biases, if it was trained with it; what is in the way is said."""
    from selmodel.report.upload import log_artifacts, wandb_options

    try:
        if wandb_options(run.path.parent) is not None:
            log_artifacts(run.path.parent, [output])
    except Exception as error:  # of a library and a service; the file is there
        log.warning("%s was not added to wandb: %s", output.name, error)


def _search(
    run: TrainedRun,
    part: ValidationLoader,
    target: float,
    identity: dict[str, Any],
    rounds: list[Round],
    partial: Path,
    precision: Callable[[], AbstractContextManager],
) -> tuple[LayeredLoss, str]:
    """Go on after ``rounds``, to which further ones are added; ``partial`` holds them all after each."""
    budgets, options = list(identity["begin"]), identity["search"]
    for one in rounds:
        budgets[one.layer] = one.budget
    n = identity["context_length"]
    loss = LayeredLoss(
        run.model, part, budgets, rule=identity["rule"], n_sinks=identity["n_sinks"], precision=precision
    )
    if loss.result.loss > target:
        raise UserError(
            f"search: the target, perplexity {math.exp(target):.2f}, is below that of the model under the budgets the "
            f"search begins with, {loss.result.perplexity:.2f} on the {loss.result.sequences} sequences searched on; "
            "give a higher target, or begin with larger budgets"
        )
    steps = search_steps(options["step"], n, options["schedule"])
    if rounds:
        log.info("going on after round %d, memory factor %.2f", len(rounds), memory_factor(budgets, n, len(budgets)))
        steps = [step for step in steps if step <= rounds[-1].step]
    with _progress(loss, n) as show:

        def on_round(one: Round) -> None:
            rounds.append(one)
            write_atomically(partial, to_json({"identity": identity, "rounds": [asdict(each) for each in rounds]}))
            show(len(rounds))

        try:
            return loss, search_budgets(loss, target, steps, on_round)
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT, len(rounds), "round") from None


def _figures(pruned: ValidationResult, unpruned: ValidationResult, target: float | None) -> dict[str, Any]:
    return {
        "sequences": pruned.sequences,
        "tokens": pruned.tokens,
        "loss": pruned.loss,
        "perplexity": pruned.perplexity,
        "unpruned_loss": unpruned.loss,
        "unpruned_perplexity": unpruned.perplexity,
        "target_loss": target,
        "target_perplexity": None if target is None else math.exp(target),
    }


def _lines(content: dict[str, Any], output: Path) -> Iterator[str]:
    seen, unseen, n = content["searched_on"], content["unseen"], content["context_length"]
    yield f"  keys held by layer   {' '.join(map(str, content['budgets']))} of {n}, rule {content['rule']}"
    yield f"  memory factor        {content['memory_factor']:.1f}"
    yield f"  {'perplexity':<21}{'under budgets':>15}{'without':>10}{'target':>10}"
    for name, part in (("searched on", seen), ("not seen", unseen)):
        target = "-" if part["target_perplexity"] is None else f"{part['target_perplexity']:.2f}"
        figures = f"{part['perplexity']:>15.2f}{part['unpruned_perplexity']:>10.2f}{target:>10}"
        yield f"    {name:<19}{figures}   {part['sequences']:,} sequences"
    if unseen["target_loss"] is not None and unseen["loss"] > unseen["target_loss"]:
        yield "  on the part not seen the target is missed; a larger search.sequences makes the two agree better"
    if content["ended"] == "floor":
        yield f"  every layer holds {LEAST_BUDGET} keys, the least there is; the target would allow fewer"
    yield f"  written to           {output} (budgets=FILE of evaluate.py and generate.py)"


def _finished(output: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The result of an earlier search, if it was this one."""
    try:
        content = json.loads(output.read_text())
        found = {key: content[key] for key in identity}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"output={output}: exists and is no result of this search ({type(error).__name__}); move it, or choose "
            "another output=FILE"
        ) from None
    _refuse_other(output, found, identity)
    log.info("this search is finished; to search again, move %s or choose another output=FILE", output)
    for line in _lines(content, output):
        log.info(line)
    return content


def _rounds_so_far(partial: Path, identity: dict[str, Any]) -> list[Round]:
    if not partial.exists():
        return []
    try:
        content = json.loads(partial.read_text())
        found, rounds = content["identity"], [Round(**one) for one in content["rounds"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{partial}: the state of an unfinished search cannot be read ({type(error).__name__}); move it to begin "
            "anew"
        ) from None
    _refuse_other(partial, found, identity)
    return rounds


def _refuse_other(path: Path, found: dict[str, Any], identity: dict[str, Any]) -> None:
    # As JSON has it: tuples are lists, and NaN is null.
    faults = differences(found, json.loads(to_json(identity)), there="in the file", here="now")
    if faults:
        raise UserError(
            f"{path} is of another search:\n  " + "\n  ".join(faults) + "\nMove it, or choose another output=FILE"
        )


def _check_comparable(run: TrainedRun, other: TrainedRun) -> None:
    faults = []
    if run.tokenizer.hash != other.tokenizer.hash:
        faults.append("another tokenizer")
    if run.model.context_length != other.model.context_length:
        faults.append(
            f"model.context_length={other.model.context_length}, and {run.model.context_length} in {run.path}"
        )
    if faults:
        raise UserError(
            f"search.target={other.path}: has {' and '.join(faults)}, so its perplexity is over other tokens; take one "
            "trained alike, or give a number"
        )


def _parts(whole: ValidationSet, sequences: int) -> tuple[ValidationSet, ValidationSet]:
    """The first sequences, to search on, and the rest."""
    if sequences >= whole.n_sequences:
        raise UserError(
            f"search.sequences={sequences} of data.validation_sequences={whole.n_sequences}: none would be left to "
            "report on; lower the one, or raise the other (as far as the validation split reaches)"
        )
    return (
        ValidationSet(whole.tokens[:sequences], whole.token_bytes[:sequences], whole.eos_id),
        ValidationSet(whole.tokens[sequences:], whole.token_bytes[sequences:], whole.eos_id),
    )


@contextmanager
def _placed(trainer: Trainer, run: TrainedRun | None) -> Iterator[None]:
    """The run's network on the trainer's device and in its precision meanwhile."""
    if run is not None:
        run.module.to(trainer.strategy.root_device)
        trainer.strategy.precision_plugin.convert_module(run.module)
    yield
    if run is not None:
        run.module.to("cpu")


@contextmanager
def _progress(loss: LayeredLoss, n: int) -> Iterator[Any]:
    """A bar in a terminal, a line now and then elsewhere: rounds, budgets and the factor reached."""
    bar = tqdm(desc="search", unit=" rounds", disable=not sys.stderr.isatty(), dynamic_ncols=True)
    last = time.monotonic()

    def show(rounds: int) -> None:
        nonlocal last
        factor = memory_factor(loss.budgets, n, len(loss.budgets))
        text = f"memory factor {factor:.2f}, perplexity {loss.result.perplexity:.2f}"
        bar.n = rounds
        bar.set_postfix_str(text)
        if bar.disable and time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            log.info("round %d: %s, budgets %s", rounds, text, " ".join(map(str, loss.budgets)))

    try:
        yield show
    finally:
        bar.close()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
