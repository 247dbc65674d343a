"""A real SLURM on this machine alone, for tests: two nodes, two partitions, preemption.

    python slurm/cluster/one_machine.py up DIR      # prints the lines to set in a shell
    python slurm/cluster/one_machine.py down DIR

Needs slurmctld, slurmd, the SLURM client commands and munge, and to be root (Debian: apt-get install slurmctld slurmd
slurm-client munge). All files lie in DIR, an empty or new folder; nothing outside it is changed. `down` stops the
daemons that DIR's pid files name, and no others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel")
NODES = ("n1", "n2")
CPUS = 2  # of each node; both nodes share this machine's
SECONDS_TO_START = 20

# Preemption sends the job's own signal first, then SIGTERM, waits GraceTime, and puts the job back into the queue. A
# requeued job may start again as soon as credentials have expired, which is two minutes unless said otherwise.
CONFIG = """\
ClusterName=onemachine
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[slurmctld]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=10
MinJobAge=3600
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[n1]} CPUs={cpus} RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[n2]} CPUs={cpus} RealMemory=4000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL Default=NO PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why a cluster cannot be started here; None where it can."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)} (Debian: apt-get install slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "its daemons need root, and this is another user"


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class OneMachineCluster:
    """The cluster in a folder; a context manager that starts it and stops it.

    Attributes:
        root: folder of all its files.
        environment: variables that its client commands, and jobs submitted with them, need.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        commands = Path(__file__).resolve().parent / "bin"
        self.environment = {
            "SLURM_CONF": str(self.root / "slurm.conf"),
            "PATH": f"{commands}:{_path()}",
            "MASTER_ADDR": "127.0.0.1",  # n1 and n2 are no names that resolve
        }

    def __enter__(self) -> OneMachineCluster:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Start the daemons and wait until both nodes are idle.

        RuntimeError, with the ends of the logs, where they do not become so; what was started is stopped again.
        """
        if self.root.exists() and any(self.root.iterdir()):
            raise RuntimeError(f"{self.root}: is not empty; expected a new folder")
        try:
            self._start()
        except RuntimeError as error:
            logs = "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in (self.root / "log").iterdir())
            self.down()
            raise RuntimeError(f"{error}\n{logs}") from None

    def _start(self) -> None:
        for folder in ("state", "log", "munge", *(f"spool/{node}" for node in NODES)):
            (self.root / folder).mkdir(parents=True)
        for folder in (self.root, self.root / "munge"):
            folder.chmod(0o755 if folder == self.root else 0o700)
        key = self.root / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        host = socket.gethostname().split(".")[0]
        config = CONFIG.format(root=self.root, host=host, ports=_free_ports("slurmctld", *NODES), cpus=CPUS)
        (self.root / "slurm.conf").write_text(config)
        munge = self.root / "munge"
        self._run(
            ["munged", f"--key-file={key}", f"--socket={self.root}/munge.socket", f"--pid-file={munge}/pid",
             f"--log-file={munge}/log", f"--seed-file={munge}/seed"]
        )  # fmt: skip
        self._run(["slurmctld", "-f", str(self.root / "slurm.conf")])
        for node in NODES:
            self._run(["slurmd", "-f", str(self.root / "slurm.conf"), "-N", node])
        deadline = time.monotonic() + SECONDS_TO_START
        states: list[str] = []
        while time.monotonic() < deadline:
            result = self._run(["sinfo", "--noheader", "--partition=low", "--Node", "--format=%T"], check=False)
            states = result.stdout.split()
            if states == ["idle"] * len(NODES):
                return
            time.sleep(0.2)
        raise RuntimeError(f"the nodes are {states or 'not there'} after {SECONDS_TO_START} s")

    def down(self) -> None:
        """Cancel what runs and stop the daemons."""
        controlled = (self.root / "slurmctld.pid").exists()
        if controlled:
            self._run(["scancel", "--full", "--state=RUNNING"], check=False)
            self._run(["scancel", "--state=PENDING"], check=False)
        deadline = time.monotonic() + 15
        while controlled and time.monotonic() < deadline:
            result = self._run(["squeue", "--noheader"], check=False)
            if result.returncode != 0 or not result.stdout.strip():
                break
            time.sleep(0.2)
        files = [*(self.root / f"slurmd-{node}.pid" for node in NODES), self.root / "slurmctld.pid"]
        for file in [*files, self.root / "munge" / "pid"]:
            _stop(file)

    def _run(self, command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
        try:
            result = subprocess.run(
                command, env=os.environ | self.environment, capture_output=True, text=True, timeout=30, check=False
            )
        except subprocess.TimeoutExpired:
            result = subprocess.CompletedProcess(command, 1, "", "no answer in 30 s")
        if check and result.returncode != 0:
            raise RuntimeError(f"{command[0]}: exit status {result.returncode}: {result.stderr.strip()[-500:]}")
        return result


def _free_ports(*names: str) -> dict[str, int]:
    """A port for each name that no one listens on now, so that several clusters may run on one machine."""
    with contextlib.ExitStack() as held:
        sockets = {name: held.enter_context(socket.socket()) for name in names}
        for one in sockets.values():
            one.bind(("127.0.0.1", 0))
        return {name: one.getsockname()[1] for name, one in sockets.items()}


def _stop(pid_file: Path) -> None:
    """End the process that a pid file names."""
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        return
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    """Whether a process is there and not a zombie, which only its parent can remove."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def main(arguments: list[str]) -> None:
    if len(arguments) != 2 or arguments[0] not in ("up", "down"):
        sys.exit(f"usage: {Path(__file__).name} up|down DIR")
    cluster = OneMachineCluster(Path(arguments[1]))
    if arguments[0] == "down":
        cluster.down()
        return
    if (reason := missing()) is not None:
        sys.exit(f"error: no SLURM can be started here: {reason}")
    cluster.up()
    for name, value in cluster.environment.items():
        print(f"export {name}='{value}'")


if __name__ == "__main__":
    main(sys.argv[1:])
