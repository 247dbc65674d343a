"""What Hydra calls for `python train.py -m`; it takes plugins from packages called hydra_plugins alone.

The work is done in selmodel.sweep.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, configure_log
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

log = logging.getLogger("selmodel.sweep")


class GridSweeper(BasicSweeper):
    """Every combination of the values, in a folder whose name, and whose jobs' names, follow from the overrides alone.

    Values come from the command line and from ``hydra.sweeper.params``, which an experiment sets; what is typed wins.
    Any launcher can run the jobs. At the end the state of all jobs is written to the log, and a failed job is an error.
    """

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None = None) -> None:
        super().__init__(max_batch_size, params)
        self._axes: set[str] = set()
        self._directory = Path()
        self._listed = False
        self._submitted_before: set[str] = set()  # SLURM's ids

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from selmodel.sweep.submission import is_slurm, set_defaults

        # Before the launcher is made, which reads both.
        self.hydra_context, self.config = hydra_context, config
        self._name_folders(list(config.hydra.overrides.task))
        if is_slurm(config.hydra.launcher):
            set_defaults(config.hydra.launcher)
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments: list[str]) -> Any:
        from selmodel.errors import UserError
        from selmodel.evaluation.run import check_report
        from selmodel.sweep.processes import check_parallel
        from selmodel.sweep.status import FAILED, sweep_status, table
        from selmodel.sweep.submission import NothingToSubmit, is_slurm
        from selmodel.training.interrupt import Interrupted

        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        check_parallel(self.config.sweep.parallel)
        check_report(self.config.sweep.report, "sweep.report")
        failure = None
        try:
            super().sweep(arguments)
        except NothingToSubmit:
            pass
        except KeyboardInterrupt:  # while waiting for the jobs of a cluster
            if not (self._listed and is_slurm(self.config.hydra.launcher)):
                raise
            failure = self._stopped_waiting()
        except UserError as error:
            failure = error
        except Exception as error:  # a job's, told of below from its folder; or the launcher's
            failure = self._after_submission(error) if type(error).__module__.startswith("submitit.") else error
        finally:
            if not self._listed:
                self._leave_no_trace()
            # Also after a signal, which passes through as Interrupted.
            states = sweep_status(self._directory) if self._listed else []
            if states:
                for line in ("", *table(self._directory, states)):
                    log.info(line)
        if isinstance(failure, Interrupted):
            raise failure
        self._report()
        failed = [f"{one.job.name}: {one.error.splitlines()[0]}" for one in states if one.state == FAILED]
        if failed:
            count = f"{len(failed)} of {len(states)} jobs failed; the same command tries them again"
            raise UserError("\n".join([count, *failed])) from failure
        if failure is not None:
            raise failure

    def _after_submission(self, error: Exception) -> BaseException:
        """What an error of submitit's means: sbatch refused, or a job failed, and the others are waited for."""
        from selmodel.errors import UserError
        from selmodel.sweep.submission import follow_to_the_end, submissions, submitit_folder

        folder = submitit_folder(self.config.hydra.launcher, self._directory)
        submitted = submissions(folder) - self._submitted_before
        if not submitted:
            return UserError(f"hydra/launcher=submitit_slurm: {str(error).strip()}")
        try:
            follow_to_the_end(folder, submitted, self._directory)
        except KeyboardInterrupt:
            return self._stopped_waiting()
        return UserError("not all jobs have finished; the same command goes on with them")

    def _stopped_waiting(self) -> BaseException:
        from selmodel.training.interrupt import Interrupted

        log.info("the jobs stay in SLURM's queue; scancel stops them, each with its state saved")
        return Interrupted(signal.SIGINT, None)

    def _leave_no_trace(self) -> None:
        """Of a sweep that was refused: remove the folder that Hydra has made for it, unless it holds more."""
        with contextlib.suppress(OSError):
            if {path.name for path in self._directory.iterdir()} == {"multirun.yaml"}:
                (self._directory / "multirun.yaml").unlink()
                self._directory.rmdir()
                self._directory.parent.rmdir()  # only if it is empty

    def _report(self) -> None:
        """The report that the sweep is for, where one is named; what stands in its way fails no sweep."""
        name = self.config.sweep.report
        if name is None or not self._listed:
            return
        from selmodel.errors import UserError
        from selmodel.evaluation.run import make_report

        log.info("")
        try:
            make_report(str(name), self._directory)
        except UserError as error:
            log.info("report=%s: %s", name, error)

    def _name_folders(self, arguments: list[str]) -> None:
        """What varies, and so the sweep's folder; ``hydra.sweep.dir`` is set to it unless it was typed."""
        from selmodel.errors import UserError
        from selmodel.sweep.grid import is_of_a_job, key_of, sweep_name

        typed = OverridesParser.create(config_loader=self.hydra_context.config_loader).parse_overrides(arguments)
        keys = [key_of(override.get_key_element()) for override in typed]
        self._axes = {str(key) for key in self.params}
        self._axes |= {key for key, override in zip(keys, typed, strict=True) if override.is_sweep_override()}
        if not any(is_of_a_job(axis) for axis in self._axes):
            raise UserError(
                "-m: nothing varies; expected an option with several values, such as attention=standard,selective, or "
                "an experiment that brings them, such as experiment=perplexity_vs_heads"
            )
        overrides = self.config.hydra.overrides.hydra
        if not any(key_of(override) == "hydra.sweep.dir" for override in overrides):
            from selmodel.sweep.processes import quoted

            fixed = [one.input_line for key, one in zip(keys, typed, strict=True) if key not in self._axes]
            options = self.config.sweep
            directory = Path(str(options.root)).expanduser() / str(options.name or sweep_name(fixed))
            with open_dict(self.config):
                self.config.hydra.sweep.dir = str(directory)
                # Launchers compose each job's configuration anew, from these.
                overrides.append(f"hydra.sweep.dir={quoted(str(directory))}")
        self._directory = Path(str(self.config.hydra.sweep.dir)).absolute()

    def get_job_batch(self) -> Sequence[Sequence[str]]:
        """The jobs, composed once to find mistakes, put on the sweep's list, each with its folder's name."""
        from selmodel.sweep.grid import key_of, make_jobs, write_manifest
        from selmodel.sweep.submission import (
            NothingToSubmit,
            check_submission,
            is_slurm,
            prepare,
            still_to_submit,
            submissions,
            submitit_folder,
        )

        batch = super().get_job_batch()
        jobs = make_jobs(batch, self._axes)
        self.validate_batch_is_legal(batch)
        launcher, submitted = self.config.hydra.launcher, jobs
        if is_slurm(launcher):
            configs = [self._config_of(job) for job in jobs]
            typed = {key_of(override) for override in self.config.hydra.overrides.hydra}
            left = still_to_submit(launcher, self._directory, jobs, configs)
            submitted, configs = [jobs[place] for place in left], [configs[place] for place in left]
            check_submission(launcher, typed, self._directory, submitted, configs)
            prepare(configs)
            self._submitted_before |= submissions(submitit_folder(launcher, self._directory))
        write_manifest(self._directory, jobs)
        self._listed = True
        if not submitted:
            if self.is_done():
                raise NothingToSubmit
            return self.get_job_batch()
        if is_slurm(launcher):
            log.info("%d jobs for SLURM; this command waits for them and may be stopped: they go on", len(submitted))
        return [[*job.overrides, f"hydra.sweep.subdir={job.name}"] for job in submitted]

    def _config_of(self, job: Any) -> DictConfig:
        """A job's configuration, without Hydra's own part."""
        cfg = self.hydra_context.config_loader.load_sweep_config(self.config, list(job.overrides))
        with open_dict(cfg):
            del cfg["hydra"]
            cfg.runs_root, cfg.run_dir = str(self._directory), str(self._directory / job.name)
        return cfg


class ProcessLauncher(Launcher):
    """Runs jobs as processes of this machine, ``sweep.parallel`` at once (selmodel.sweep.processes)."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from selmodel.sweep.grid import Job, is_of_a_job, key_of
        from selmodel.sweep.processes import ProcessPool

        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        directory = Path(str(self.config.hydra.sweep.dir)).absolute()
        jobs = []
        for overrides in job_overrides:
            (name,) = (one.split("=", 1)[1] for one in overrides if key_of(one) == "hydra.sweep.subdir")
            jobs.append(Job(name, tuple(one for one in overrides if is_of_a_job(one))))
        parallel = self.config.sweep.parallel
        log.info("%s: %d jobs, %d at once", directory, len(jobs), parallel)
        ProcessPool(directory, parallel, [sys.executable, sys.argv[0]]).run(jobs)
        # How each went is in its folder, where the sweeper looks.
        return [JobReturn(overrides=list(one), status=JobStatus.COMPLETED) for one in job_overrides]


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="grid",
    node={"_target_": f"{__name__}.GridSweeper", "max_batch_size": None, "params": None},
    provider="selmodel",
)
ConfigStore.instance().store(
    group="hydra/launcher", name="processes", node={"_target_": f"{__name__}.ProcessLauncher"}, provider="selmodel"
)
