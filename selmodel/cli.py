"""The frame around the commands: wrong options and files are answered with a message, not a traceback."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selmodel.config import did_you_mean, register_resolvers
from selmodel.errors import UserError
from selmodel.sweep.status import ERROR_FILE
from selmodel.training.interrupt import Interrupted
from selmodel.trust import without_interpolation

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def main(task: Callable[[DictConfig], object], config_name: str, *, literal: Sequence[str] = ()) -> None:
    """Compose ``configs/<config_name>.yaml`` with the command line's overrides and run ``task`` on it.

    literal: options that are texts. What follows ``name=`` is taken as typed, where Hydra would read commas, brackets,
    quotes and ``${...}`` as its own.

    Exit status: 0 when done, 2 for a fault of the user's (``UserError`` and Hydra's own), 128 + signal when stopped
    by one. Anything else is a fault of the program and keeps its traceback.
    """
    register_resolvers()
    # Hydra otherwise prints its own errors and exits, with hints that do not fit here ("to append use +").
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    _quieten()
    texts = take_literals(sys.argv, literal)
    helping = {"--help", "-h"} & set(sys.argv[1:])
    try:
        with _without_internals() if helping else contextlib.nullcontext():
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(_job(task, texts))()
    except UserError as error:
        _fail(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        _fail(explain(error))
    except ValueError as error:
        if "Config group override" not in str(error):  # Hydra's answer to group=null
            raise
        _fail(f"a group cannot be null ({error}); python {Path(sys.argv[0]).name} --help lists the choices")
    except Interrupted as error:
        _stop(error)
    finally:
        HydraConfig.instance().cfg = None  # a sweep leaves its own, which is no run's


@contextlib.contextmanager
def _without_internals() -> Iterator[None]:
    """Leave out of Hydra's help the files that others are made of, whose names begin with an underscore."""
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            yield
    finally:
        for line in shown.getvalue().splitlines():
            group, colon, choices = line.partition(": ")
            if colon and re.fullmatch(r"[\w/]+", group) and (CONFIGS / group).is_dir():
                if any(part.startswith("_") for part in group.split("/")):
                    continue
                line = f"{group}: {', '.join(one for one in choices.split(', ') if not one.startswith('_'))}"
            print(line)


def take_literals(arguments: list[str], names: Sequence[str]) -> dict[str, str]:
    """Take ``name=text`` of each of ``names`` out of ``arguments``; of one given twice the last counts."""
    texts = {}
    for argument in list(arguments[1:]):
        name, equals, text = argument.partition("=")
        if equals and name in names:
            texts[name] = text
            arguments.remove(argument)
    return texts


def _job(task: Callable[[DictConfig], object], texts: Mapping[str, str]) -> Callable[[DictConfig], object]:
    """``task`` for Hydra to run: a wrong option ends a single run here, before Hydra adds lines of its own."""

    @functools.wraps(task)
    def run(cfg: DictConfig) -> object:
        register_resolvers()  # a launcher's process on another node has not come through main
        _quieten()
        if rank_zero_only.rank != 0:  # one process speaks for all
            logging.getLogger("selmodel").setLevel(logging.WARNING)
        for name, text in texts.items():
            cfg[name] = without_interpolation(text)
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # an earlier start's
            (Path(HydraConfig.get().runtime.output_dir) / ERROR_FILE).unlink(missing_ok=True)
        try:
            return task(cfg)
        except (UserError, OmegaConfBaseException) as error:
            message = str(error) if isinstance(error, UserError) else explain(error)
            directory = Path(HydraConfig.get().runtime.output_dir)
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                _record(directory, message)
                raise
            _remove_if_empty(directory)
            _fail(message)
        except Interrupted as error:
            if "SUBMITIT_EXECUTOR" in os.environ:  # a job's own process, with nothing around it that would say this
                _stop(error)
            raise
        except Exception as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                _record(Path(HydraConfig.get().runtime.output_dir), f"{type(error).__name__}: {error}")
            raise

    return run


def _record(directory: Path, error: str) -> None:
    """Leave a job's error in its folder, where the state of a sweep is read (launchers that run it in a process of
    theirs, such as SLURM's; the local one does the same for its processes)."""
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ERROR_FILE).write_text(error + "\n")


def _remove_if_empty(directory: Path) -> None:
    """Remove the directory that Hydra made for a run that then did not start."""
    with contextlib.suppress(OSError):
        directory.rmdir()


def explain(error: Exception) -> str:
    """Hydra's message with the name typed and a way out that works here."""
    text = str(error)
    if match := re.search(r"UserError raised while resolving interpolation: (.*)", text):
        return match[1]
    if match := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(match[1])
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not an option=value that can be read ({text.splitlines()[0]})"
    if "'hydra/launcher/submitit" in text and importlib.util.find_spec("submitit") is None:
        return "hydra/launcher=submitit_...: submitit is not installed; python -m pip install -e '.[cluster]'"
    if match := re.search(r"Could not (?:find|load) '([^']+)'", text):
        # Experiments lie in folders of their group, so the group is the first part that is one.
        group, _, choice = match[1].partition("/")
        choices = group_choices(group)
        if choices:
            near = did_you_mean(choice, choices)
            return f"{group}={choice}: no such choice{near} (expected one of {', '.join(choices)})"
    lines = [line for line in text.splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line]
    return "\n".join(lines) or type(error).__name__


def group_choices(group: str) -> list[str]:
    """Names that ``group=NAME`` accepts."""
    folder = CONFIGS / group
    names = (p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml"))
    return sorted(name for name in names if not name.startswith("_"))


def _unknown_key(key: str) -> str:
    """The answer to an option that does not exist, from the nearest one that does."""
    script = Path(sys.argv[0]).name
    known = _option_names(next((name for name in ("evaluate", "generate") if script.startswith(name)), "train"))
    return f"{key}: no such option{did_you_mean(key, known)} (python {script} --cfg job prints all options)"


def _option_names(config_name: str) -> list[str]:
    """Dotted names of all options under the groups chosen on the command line."""
    choices = [item for item in sys.argv[1:] if (CONFIGS / item.partition("=")[0]).is_dir() and "," not in item]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = hydra.compose(config_name, choices)
    names: list[str] = []

    def collect(node: object, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                if not str(key).startswith("_"):
                    names.append(f"{path}{key}")
                    collect(value, f"{path}{key}.")

    collect(OmegaConf.to_container(cfg, resolve=False), "")
    return names


def _quieten() -> None:
    """Leave out what libraries say that a user of this program cannot act on."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (".*does not have many workers.*", ".*LeafSpec.*", ".*sync_dist=True.*"):
        warnings.filterwarnings("ignore", message=message)
    # Where standard output has been closed (by `| head`), a line that cannot be written is no reason for a traceback.
    logging.raiseExceptions = False


def _stop(error: Interrupted) -> None:
    print(f"{error}; the same command goes on from there", file=sys.stderr)
    sys.exit(128 + error.signal)


def _fail(message: str) -> None:
    print(
        "\n".join(f"error: {line}" if i == 0 else f"       {line}" for i, line in enumerate(message.splitlines())),
        file=sys.stderr,
    )
    sys.exit(2)
