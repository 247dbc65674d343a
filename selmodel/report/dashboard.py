"""A Weights & Biases workspace for a project, built in code: `python -m selmodel.report.dashboard project=NAME`.

Sections for loss, what selection does in each layer, throughput, and the comparisons of a sweep. Panels are made from
the names that training logs; ``--dry-run`` prints the workspace as JSON, without an account or a network.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from selmodel.attention.selection import SelectionStatistics
from selmodel.config import did_you_mean
from selmodel.errors import UserError
from selmodel.report.upload import FIGURES, MEDIA
from selmodel.training.throughput import StepTimer
from selmodel.training.wandb_run import STEP, has_key

USAGE = """\
python -m selmodel.report.dashboard project=NAME [option=value ...] [--dry-run]

  project=NAME     the wandb project that the runs were logged to (logger.wandb.project)
  entity=NAME      user or team that owns it; without it that of the key
  group=NAME       only the runs of this sweep
  name=TEXT        of the workspace; default: selmodel
  view=URL         a saved workspace to change, instead of a new one
  --dry-run        print the workspace as JSON and send nothing"""

TOKENS = "train/tokens"


@dataclass(frozen=True)
class Lines:
    """A panel of lines over the course of training.

    Attributes:
        title: with the unit.
        metrics: names as they are logged, drawn together; or one regular expression for the metrics of all layers.
        x: the metric of the horizontal axis.
        per_layer: whether ``metrics`` holds a regular expression.
        log: whether the vertical axis is logarithmic.
    """

    title: str
    metrics: tuple[str, ...]
    x: str = STEP
    per_layer: bool = False
    log: bool = False


@dataclass(frozen=True)
class Points:
    """A panel with a point for each run: a summary figure against what the run's config says."""

    title: str
    x: str
    y: str
    log_x: bool = False


@dataclass(frozen=True)
class Images:
    """A panel of the figures that reports have logged."""

    title: str
    keys: tuple[str, ...]


_SELECTION_TITLES = {
    "mean_F": "mean of F over all pairs of query and key",
    "share_F_above_1": "share of pairs with F > 1",
    "memory_share": "share of keys still held (memory term)",
    "live_share": "share of pairs whose key is live",
}


def sections() -> dict[str, list[Lines | Points | Images]]:
    """The panels by section, in order. Metrics that a run does not log (accuracy, MFU, ...) stay empty there."""
    selection = [
        Lines(f"{_SELECTION_TITLES.get(name, name)}, by layer", (rf"^selection/{name}/layer_\d+$",), per_layer=True)
        for name in SelectionStatistics._fields
    ]
    return {
        "Loss": [
            Lines("validation loss, nats per token", ("val/loss",)),
            Lines("validation loss by tokens trained on, nats per token", ("val/loss",), x=TOKENS),
            Lines("validation perplexity", ("val/perplexity",), log=True),
            Lines("bits per byte of the validation text", ("val/bits_per_byte",)),
            Lines("training loss, nats per token", ("train/loss",)),
            Lines("training perplexity", ("train/perplexity",), log=True),
            Lines("memory term: largest share of keys held, mean over layers", ("train/memory_loss",)),
            Lines("share of right answers on the validation set", ("val/accuracy",)),
        ],
        "Selection": selection,
        "Optimization and data": [
            Lines("learning rate", ("train/lr",)),
            Lines("gradient norm before clipping; largest", ("train/grad_norm", "train/grad_norm_max"), log=True),
            Lines("steps skipped so far by the guards", ("train/skipped_steps",)),
            Lines("tokens trained on", (TOKENS,)),
            Lines("tokens validated on", ("val/tokens",)),
        ],
        "Throughput": [
            Lines("tokens per second, all devices", ("throughput/tokens_per_second",)),
            Lines("seconds per step", ("throughput/step_seconds",)),
            Lines("seconds per step, by part", tuple(f"throughput/{part}_seconds" for part in StepTimer.PARTS)),
            Lines("share of the device's peak arithmetic (MFU)", ("throughput/mfu",)),
            Lines("peak memory, GiB", ("throughput/peak_memory_gib",)),
        ],
        "Sweep": [
            Points("perplexity by heads", "n_heads", "final/perplexity", log_x=True),
            Points("perplexity by context, tokens", "context_length", "final/perplexity", log_x=True),
            Points("perplexity by parameters", "parameters", "final/perplexity", log_x=True),
            Points("perplexity by weight of the memory term", "memory_loss_eps", "final/perplexity"),
            Points("equivalent standard heads by heads", "n_heads", "equivalent_heads", log_x=True),
            Images("figures of the reports", tuple(f"{MEDIA}{name}" for name in FIGURES)),
        ],
    }


COLUMNS = ("config:kind", "config:n_heads", "config:context_length", "summary:final/perplexity", "summary:final/loss")


def build(
    *, project: str, entity: str, group: str | None = None, name: str = "selmodel", view: str | None = None
) -> Any:
    """The workspace, ready to be saved, as ``wandb_workspaces.workspaces.Workspace``.

    Args:
        project, entity: whose it is.
        group: show only the runs of this sweep; None for all.
        name: as shown.
        view: URL of a saved workspace to change; None for a new one. Read from the server.

    Raises:
        UserError: when the package ``wandb-workspaces`` is not installed.
    """
    ws, wr = _library()
    built = [
        ws.Section(
            name=title,
            panels=[_panel(wr, panel) for panel in panels],
            is_open=True,
            panel_settings=ws.SectionPanelSettings(x_axis=STEP),
        )
        for title, panels in sections().items()
    ]
    runs = ws.RunsetSettings(
        filters=[ws.Metric("Group") == group] if group else [],
        pinned_columns=list(COLUMNS),
    )
    if view is not None:
        workspace = ws.Workspace.from_url(view)
        workspace.name, workspace.sections, workspace.runset_settings = name, built, runs
        return workspace
    return ws.Workspace(
        entity=entity, project=project, name=name, sections=built, runset_settings=runs,
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=50),
    )  # fmt: skip


def spec(workspace: Any) -> dict:
    """What would be sent of ``workspace``, as plain containers."""
    view = workspace._to_model()  # the library has no public way to see it
    content = json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))
    return {"entity": view.entity, "project": view.project, "name": view.display_name, "spec": content}


def _library() -> tuple[Any, Any]:
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise UserError(
            f"the dashboard needs the package wandb-workspaces ({error}); install the extra that brings it: "
            "pip install -e '.[dashboard]'"
        ) from error
    return ws, wr


def _panel(wr: Any, panel: Lines | Points | Images) -> Any:
    if isinstance(panel, Images):
        return wr.MediaBrowser(title=panel.title, media_keys=list(panel.keys), num_columns=2)
    if isinstance(panel, Points):
        return wr.ScatterPlot(
            title=panel.title, x=wr.Config(panel.x), y=wr.SummaryMetric(panel.y), log_x=panel.log_x,
            legend_template="${run:displayName}",
        )  # fmt: skip
    axis = "tokens trained on" if panel.x == TOKENS else "optimizer steps"
    named = {"metric_regex": panel.metrics[0]} if panel.per_layer else {"y": list(panel.metrics)}
    return wr.LinePlot(title=panel.title, x=panel.x, title_x=axis, log_y=panel.log, **named)


# -- command --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Build the workspace that ``arguments`` (see ``USAGE``) ask for, and save or print it; returns the exit status."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0 if arguments else 2
    try:
        _run(arguments)
    except UserError as error:
        first, *rest = str(error).splitlines()
        print("\n".join([f"error: {first}", *(f"       {line}" for line in rest)]), file=sys.stderr)
        return 2
    return 0


def _run(arguments: Sequence[str]) -> None:
    options, dry_run = _parse(arguments)
    _library()
    if not dry_run and not has_key():
        raise UserError("no key found in WANDB_API_KEY or ~/.netrc; run `wandb login`, or look at it with --dry-run")
    try:
        if dry_run:
            # Whose it is, and what is saved already, only the server knows.
            workspace = build(**{"entity": ""} | options | {"view": None})
            print(json.dumps(spec(workspace), indent=2))
            return
        if "entity" not in options:
            import wandb

            options["entity"] = wandb.Api().default_entity
        workspace = build(**options)
        workspace.save()
    except Exception as error:  # of many kinds: network, permission, no such project, a name that wandb refuses
        raise UserError(
            f"project={options['project']}: the workspace was not saved ({type(error).__name__}: {error}); "
            "are the project and its entity right, and is the server reachable?"
        ) from error
    print(f"saved: {workspace.url}")


def _parse(arguments: Sequence[str]) -> tuple[dict[str, str], bool]:
    known = ("project", "entity", "group", "name", "view")
    options: dict[str, str] = {}
    faults = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if argument == "--dry-run":
            continue
        if option not in known or not equals:
            faults.append(f"{argument}: no such option{did_you_mean(option, known)} (expected {', '.join(known)}=...)")
        elif not value:
            faults.append(f"{option}=: expected a value")
        elif option != "name" and option != "view" and re.search(r"[/\\#?%:\s]", value):
            faults.append(f"{argument}: a name in wandb has no spaces and none of / \\ # ? % :")
        options[option] = value
    if "project" not in options:
        faults.append("project=NAME is missing: the wandb project that the runs were logged to")
    if faults:
        raise UserError("\n".join(faults))
    return options, "--dry-run" in arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
