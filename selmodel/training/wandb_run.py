"""The Weights & Biases run that belongs to a run's directory: who it is, what of the run is sent, how it is opened.

What is sent: the logged figures, the resolved configuration with architecture, versions and commit, the tags and the
summary; and, where asked for, reports and budgets. What is not: code, diffs, the command line, host name and hardware,
the list of installed packages, standard output, checkpoints. In everything sent, values of options and environment
variables whose names speak of a secret, and logins and queries in URLs, are replaced, and the home directory is ``~``.
"""

from __future__ import annotations

import hashlib
import logging
import netrc
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selmodel.data.caching import write_atomically
from selmodel.errors import UserError
from selmodel.naming import run_name
from selmodel.privacy import without_secrets

log = logging.getLogger(__name__)

MODES = ("auto", "online", "offline", "disabled")
INIT_SECONDS = 60.0  # for a server to answer when a run is opened
FINISH_SECONDS = 300.0  # for what is left to arrive at the end; the rest stays on disk for `wandb sync`
FLUSH_SECONDS = 1.0  # between writes to wandb's file, 15 by default: what it lacks at most after a kill
LONGEST_TAG = 64  # characters, wandb's limit
STEP = "trainer/step"  # the x axis of every figure: optimizer steps
# What runs are compared by, in the recorded config. Counts; memory_loss_eps is a weight, kind the class of attention.
AXES = (
    "kind", "n_heads", "n_layers", "head_dim", "d_model", "context_length", "parameters", "attention_parameters",
    "memory_loss_eps",
)  # fmt: skip

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


# -- which run ------------------------------------------------------------------------------------------------


def known_id(directory: Path) -> str | None:
    """The id of the wandb run that belongs to ``directory``, from its file ``wandb_id``; None where it has none yet."""
    path = directory / "wandb_id"
    content = path.read_text(errors="replace").strip() if path.exists() else ""
    if content and not _ID.fullmatch(content):
        log.warning("%s does not hold the id of a wandb run", path)
        return None
    return content or None


def run_id(directory: Path) -> str:
    """``known_id``, made up and kept where there is none yet."""
    known = known_id(directory)
    if known is None:
        known = secrets.token_hex(4)
        write_atomically(directory / "wandb_id", known.encode())
    return known


def sweep_name(run_dir: Path, *, multirun: bool = False) -> str | None:
    """The group that the run of ``run_dir`` belongs to: its sweep, which is the folder above it; None for a single run.

    Args:
        multirun: whether it is known to be a job of a sweep; else the folder above must hold a sweep's ``sweep.json``.
    """
    return run_dir.parent.name if multirun or (run_dir.parent / "sweep.json").exists() else None


def tags_of(overrides: Iterable[str]) -> list[str]:
    """A tag ``option=value`` for each override that changes what is computed, in the order typed.

    Of a path only the last part is kept. What is longer than wandb allows is cut and ends with a hash of the whole.
    """
    last = {item.split("=", 1)[0].lstrip("+"): item.lstrip("+") for item in overrides}
    kept = [item for item in last.values() if run_name([item]) != run_name([])]
    kept = [re.sub(r"=.*/(?=[^/])", "=", without_secrets(item)) for item in kept]
    return list(dict.fromkeys(_shortened(item) for item in kept))


def _shortened(tag: str) -> str:
    if len(tag) <= LONGEST_TAG:
        return tag
    return f"{tag[: LONGEST_TAG - 9]}-{hashlib.sha256(tag.encode()).hexdigest()[:8]}"


# -- whether and how ------------------------------------------------------------------------------------------


def resolve_mode(mode: str) -> str:
    """``mode`` of ``logger.wandb`` made definite: ``online``, ``offline`` or ``disabled``.

    ``auto`` is what ``WANDB_MODE`` says, and without it online when a key is found and offline otherwise.

    Raises:
        UserError: for an unknown mode, or online without a key, which wandb would ask for.
    """
    if mode not in MODES:
        raise UserError(f"logger.wandb.mode={mode}: must be one of {', '.join(MODES)}")
    option = f"logger.wandb.mode={mode}"
    if mode == "auto":
        wanted = {"dryrun": "offline", "run": "online"}.get(
            os.environ.get("WANDB_MODE", ""), os.environ.get("WANDB_MODE")
        )
        if wanted and wanted not in MODES[1:]:
            raise UserError(f"WANDB_MODE={wanted}: must be one of {', '.join(MODES[1:])}, or not set")
        option = f"WANDB_MODE={wanted}"
        mode = wanted or ("online" if has_key() else "offline")
    if mode == "online" and not has_key():
        raise UserError(
            f"{option}: no key found in WANDB_API_KEY or ~/.netrc; run `wandb login`, or set logger.wandb.mode=offline"
        )
    return mode


def has_key() -> bool:
    """Whether wandb would find a key for its server without asking."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        entries = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    import wandb

    server = os.environ.get("WANDB_BASE_URL") or wandb.setup().settings.base_url
    hosts = {urlsplit(server).netloc}
    if server == wandb.Settings().base_url:  # the public server, under either of its names
        hosts.add("api.wandb.ai")
    return any(entries.authenticators(host) is not None for host in hosts)


def open_run(
    directory: Path,
    *,
    project: str,
    entity: str | None,
    name: str | None,
    group: str | None,
    mode: str,
    job_type: str | None = None,
    system_metrics: bool = False,
) -> Any:
    """Begin or go on with the wandb run of ``directory``. Never asks.

    A server that refuses or does not answer in ``INIT_SECONDS`` costs the live view and nothing else: the run is then
    written offline, for ``wandb sync``. A run of its own each time, whatever else is open in this process.

    Args:
        mode: ``online``, ``offline`` or ``disabled``.
        system_metrics: whether wandb also records the use of processors, memory and GPU.

    Raises:
        Exception: what wandb raises when it cannot begin even offline, such as an ``OSError`` of a full disk.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb's own errors, sent to its makers even when offline
    import wandb

    def begin(mode: str) -> Any:
        settings = wandb.Settings(
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            silent=True,  # it would print to the terminal what belongs in the log
            console="off",
            host="",
            save_code=False,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_machine_info=not system_metrics,
            x_disable_stats=not system_metrics,
            x_save_requirements=False,
            x_transaction_log_flush_interval=FLUSH_SECONDS,
        )
        return wandb.init(
            dir=str(directory), id=run_id(directory), resume="allow", reinit="create_new", mode=mode,
            project=project, entity=entity, name=name, group=group, job_type=job_type, settings=settings,
        )  # fmt: skip

    directory.mkdir(parents=True, exist_ok=True)
    try:
        run = begin(mode)
        if mode == "online":
            log.info("wandb: %s", run.url)
        return run
    except Exception as error:
        if mode != "online":
            raise
        log.warning(
            "wandb: no run at the server (%s); logging offline below %s, send it later with `wandb sync`",
            _first_line(error), directory / "wandb",
        )  # fmt: skip
        wandb.teardown()  # its service process holds on to the id of the run that it could not begin
        return begin("offline")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# -- what is sent ---------------------------------------------------------------------------------------------


def recorded_config(identity: dict, parameters: dict[str, int]) -> dict:
    """What is recorded as a run's config: its resolved options, what they came to, and what runs are compared by.

    Args:
        identity: of the run, as its checkpoints hold it: config, architecture, data, environment.
        parameters: their numbers, as ``Transformer.n_parameters`` counts them.

    Returns:
        the options by group; ``architecture``, ``corpus`` and ``environment`` (versions, commit, precision); and at the
        top, where charts find them, the values named in ``AXES``.
    """
    config, architecture = identity["config"], identity["architecture"]
    facts = {"corpus": identity["data"], "architecture": architecture, "environment": identity["environment"]}
    axes = {name: architecture[name] for name in AXES if name in architecture}
    axes |= {
        "kind": architecture["attention"]["kind"],
        "parameters": parameters["total"],
        "attention_parameters": parameters["attention"],
        "memory_loss_eps": (config["attention"].get("memory_loss") or {}).get("eps", 0.0),
    }
    return config | facts | axes
