"""``make faults``: at least a hundred faults in real training runs, and whether each came back exactly as it was.

A chain is one run that is struck again and again, each start another time, until it is done. Then it must be, to the
last bit, the run that nobody disturbed. Which fault comes when follows from the seed; the scheduler of the machine
decides the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from selmodel.training.checkpoint_file import DamagedCheckpoint, read_checkpoint
from tests.faults.harness import EVERY, LIMIT, Moment, Training, differences, made_a_step, make_corpus, resumed_at
from tests.faults.kinds import KINDS, WEIGHTS, Outcome, set_immutable, small_disk

PER_CHAIN = 8  # faults of one run
TWO_RANKS = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "data.workers=0")


@dataclass
class Fault:
    """One fault and what came of it.

    Attributes:
        kind, place: what, and when.
        outcome: of the process that was struck.
        newest: step of the newest whole checkpoint after it.
        lost: steps that had to be trained again.
        resumed: seconds from the next start to its first step; None where the run bore the fault or was done.
        problems: what was not as promised.
    """

    kind: str
    place: str
    outcome: Outcome
    newest: int = 0
    lost: int = 0
    resumed: float | None = None
    problems: list[str] = field(default_factory=list)


def judge(fault: Fault, struck: str, next_start: str) -> None:
    """Add to a fault's problems what the next start shows.

    Args:
        fault: with its outcome.
        struck, next_start: what the process that was struck printed, and the one after it.
    """
    outcome, step = fault.outcome, resumed_at(next_start)
    if outcome.seconds is None:
        fault.problems.append(f"did not end within {LIMIT:.0f} s")
    if step != fault.newest:
        fault.problems.append(f"went on from step {step}, and the newest whole checkpoint was of step {fault.newest}")
    fault.lost = max(0, outcome.at_step - step)
    # Where saving had failed before, and was told of, the interval is since the last one that did not.
    if fault.lost > EVERY * (1 + outcome.damaged) and "could not be written" not in struck:
        fault.problems.append(f"{fault.lost} steps lost, from {outcome.at_step} to {step}")
    if outcome.must_tell and "; passed over" not in next_start:
        fault.problems.append("went on past a damaged checkpoint and did not say so")


def newest_step(run: Path) -> int:
    """Step of the newest whole checkpoint of a run, 0 where there is none."""
    steps = [0]
    for path in run.glob("*.ckpt"):
        with contextlib.suppress(DamagedCheckpoint):
            steps.append(read_checkpoint(path)["selmodel"]["step"])
    return max(steps)


@dataclass
class Ground:
    """Where a campaign takes place.

    Attributes:
        place: folder for all of it.
        corpus: that is trained on.
        references: the undisturbed runs, by whether two processes share them.
        seed: of the choice of faults and moments.
    """

    place: Path
    corpus: Path
    references: dict[bool, Path]
    seed: int

    @classmethod
    def prepare(cls, place: Path, seed: int, *, two_ranks: bool = True) -> Ground:
        """Make the corpus and train the undisturbed runs."""
        corpus = make_corpus(place / "corpus")
        references = {}
        for ranks in (False, True) if two_ranks else (False,):
            run = place / ("reference-2" if ranks else "reference")
            if not (run / "results.json").exists():
                options = TWO_RANKS if ranks else ()
                training = Training.start(run, corpus, place / "cache", *options, outputs=place / f"{run.name}-out")
                training.wait_ended(10 * LIMIT)
                if training.process.returncode != 0:
                    raise RuntimeError(f"the undisturbed run failed:\n{training.text()}")
            references[ranks] = run
        return cls(place, corpus, references, seed)


def chain(number: int, kinds: list[str], ground: Ground) -> tuple[list[Fault], list[str]]:
    """Strike one run with ``kinds``, one after the other, and compare it with the undisturbed one.

    Returns:
        the faults, and the kinds for which the run was done too early.
    """
    _, two_ranks, small = KINDS[kinds[0]]
    generator = random.Random(f"{ground.seed}/{number}")
    faults: list[Fault] = []
    waiting = list(kinds)
    with ExitStack() as stack:
        folder = ground.place / f"chain-{number:03d}"
        if small:
            stack.enter_context(small_disk(folder))
        corpus = ground.place / f"corpus-{number:03d}"  # its own, for a shard of it may be taken away
        shutil.copytree(ground.corpus, corpus)
        run = folder / "run"

        def start() -> Training:
            options = TWO_RANKS if two_ranks else ()
            outputs = ground.place / f"chain-{number:03d}-out"
            return Training.start(run, corpus, ground.place / "cache", *options, outputs=outputs)

        training = start()
        stack.callback(lambda: training.kill_all())
        while waiting:
            moment = Moment.choose(generator)
            if not moment.wait(training):
                break  # it is done
            kind = waiting.pop(0)
            fault = Fault(kind, moment.place, KINDS[kind][0](training, generator))
            faults.append(fault)
            fault.problems += fault.outcome.problems
            if fault.outcome.went_on and not (training.ended and training.process.returncode):
                continue  # the next one meets the same process
            struck, fault.newest = training.text(), newest_step(run)
            training = start()
            if training.wait_until(lambda training=training: made_a_step(training)):
                fault.resumed = time.monotonic() - training.started
            elif not training.ended:
                fault.problems.append(f"not training again after {LIMIT:.0f} s")
            judge(fault, struck, training.text())
        seconds = training.wait_ended(4 * LIMIT)
        problems = []
        if seconds is None or training.process.returncode != 0:
            problems.append(f"its last start ended with {training.process.returncode}, see {training.output}")
        problems += differences(run, ground.references[two_ranks])
        if faults:
            faults[-1].problems += [f"chain {number}: {one}" for one in problems]
        shutil.rmtree(corpus)
        if not problems and not small:
            shutil.rmtree(folder)
    return faults, waiting


def choose_kinds(n_faults: int, seed: int, only: list[str]) -> list[str]:
    """``n_faults`` kinds, each as often as its weight says, at least once where there is room."""
    weights = {kind: weight for kind, weight in WEIGHTS.items() if not only or kind in only}
    total = sum(weights.values())
    chosen = [kind for kind, weight in weights.items() for _ in range(max(1, round(n_faults * weight / total)))]
    generator = random.Random(seed)
    while len(chosen) < n_faults:
        chosen.append(generator.choices(list(weights), list(weights.values()))[0])
    generator.shuffle(chosen)
    return chosen[:n_faults] if len(chosen) > n_faults and n_faults >= len(weights) else chosen


def campaign(ground: Ground, kinds: list[str], at_once: int) -> list[Fault]:
    """Strike runs until every one of ``kinds`` has been placed."""
    groups: dict[tuple, list[str]] = {}
    for kind in kinds:
        groups.setdefault(KINDS[kind][1:], []).append(kind)
    numbers, faults, lock = itertools.count(), [], threading.Lock()

    def work() -> None:
        while True:
            with lock:
                group = max(groups.values(), key=len)
                taken, group[:] = group[:PER_CHAIN], group[PER_CHAIN:]
                number = next(numbers)
            if not taken:
                return
            found, left = chain(number, taken, ground)
            with lock:
                faults.extend(found)
                group.extend(left)
                bad = sum(bool(fault.problems) for fault in found)
                print(f"chain {number}: {len(found)} faults, {bad} with problems; {len(faults)} in all", flush=True)
                for fault in found:
                    for problem in fault.problems:
                        print(f"  {fault.kind} while {PLACES[fault.place]}: {problem}", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(work) for _ in range(at_once)]:
            done.result()
    return faults


PLACES = {"start": "starting", "step": "in a step", "checkpoint": "writing a checkpoint", "validation": "validating"}


def table(faults: list[Fault]) -> list[str]:
    """Markdown lines: a row per kind of fault, and one for all."""
    lines = [
        "| fault | times | came back exactly | borne without a stop | steps trained again, median (most) | seconds "
        "until it had ended, median (most) | seconds from the next start to its first step, median (most) |",
        "|---|---|---|---|---|---|---|",
    ]
    by_kind: dict[str, list[Fault]] = {kind: [fault for fault in faults if fault.kind == kind] for kind in KINDS}
    for name, some in [*by_kind.items(), ("**all**", faults)]:
        if not some:
            continue
        stopped = [fault for fault in some if not fault.outcome.went_on]
        cells = [
            name, str(len(some)), str(sum(not fault.problems for fault in some)), str(len(some) - len(stopped)),
            _median([fault.lost for fault in stopped], 0),
            _median([fault.outcome.seconds for fault in stopped if fault.outcome.seconds is not None], 1),
            _median([fault.resumed for fault in some if fault.resumed is not None], 1),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _median(values: list[float], digits: int) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.{digits}f} ({max(values):.{digits}f})"


def write_report(path: Path, faults: list[Fault], command: str, minutes: float, skipped: list[str]) -> None:
    """Put the table into ``path`` between its two marks."""
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    places = [f"{sum(fault.place == place for fault in faults)} while {words}" for place, words in PLACES.items()]
    bad = [fault for fault in faults if fault.problems]
    lines = [
        "",
        f"`{command}`: {len(faults)} faults ({', '.join(places)}) in {minutes:.0f} minutes on {os.cpu_count()} cores.",
        *(f"Not tried: {one}." for one in skipped),
        "Every one came back exactly, none hung." if not bad else f"{len(bad)} did not come back as promised:", "",
        *(f"- {fault.kind} while {PLACES[fault.place]}: {'; '.join(fault.problems)}" for fault in bad),
        *([""] if bad else []), *table(faults), "",
    ]  # fmt: skip
    path.write_text(before + BEGIN + "\n".join(lines) + END + after)


BEGIN, END = "<!-- campaign -->\n", "<!-- end of campaign -->"


def impossible(place: Path) -> dict[str, str]:
    """Kinds that this machine does not allow, and why."""
    found = {}
    try:
        with small_disk(place / "probe"):
            pass
    except OSError as error:
        found["full disk (tmpfs)"] = str(error)
    probe = place / "probe-2"
    probe.mkdir()
    try:
        set_immutable(probe, True)
        set_immutable(probe, False)
    except OSError as error:
        found["read-only folder"] = (
            f"{error} (a folder is made immutable, which takes the superuser and an ext file system)"
        )
    return found


def main() -> int:
    """Exit status 1 where a fault did not come back as promised."""
    parser = argparse.ArgumentParser(description="Faults in real training runs, and whether they come back exactly.")
    parser.add_argument("--faults", type=int, default=110, help="how many, at least (default: 110)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2, help="runs at once (default: 2)")
    parser.add_argument("--kinds", nargs="*", default=[], choices=list(KINDS), help="these alone")
    parser.add_argument("--report", type=Path, help="Markdown page whose table is replaced")
    parser.add_argument("--place", type=Path, help="folder to work in; default: a new one in the system's for such")
    arguments = parser.parse_args()
    place = (arguments.place or Path(tempfile.mkdtemp(prefix="faults-"))).absolute()
    place.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    not_here = impossible(place)
    for kind, reason in not_here.items():
        print(f"not tried here: {kind} ({reason})", flush=True)
    kinds = [kind for kind in choose_kinds(arguments.faults, arguments.seed, arguments.kinds) if kind not in not_here]
    ground = Ground.prepare(place, arguments.seed, two_ranks=any(KINDS[kind][1] for kind in kinds))
    faults = campaign(ground, kinds, arguments.at_once)
    minutes = (time.monotonic() - begin) / 60
    print("\n".join(table(faults)))
    n_bad = sum(bool(fault.problems) for fault in faults)
    print(f"{len(faults)} faults in {minutes:.1f} minutes, {n_bad} with problems")
    if arguments.report:
        command = f"python -m tests.faults.campaign --faults {arguments.faults} --seed {arguments.seed}"
        skipped = [f"{kind} ({reason})" for kind, reason in not_here.items()]
        write_report(arguments.report, faults, command, minutes, skipped)
    failed = n_bad > 0
    if not failed and arguments.place is None:
        shutil.rmtree(place)
    elif failed:
        print(f"what was left of them: {place}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
