"""A real Slurm of several nodes on one machine, in a directory of its own: munged, slurmctld and one slurmd a node.

`with SlurmCluster(directory, num_nodes=3) as slurm: slurm.sbatch(...)`. Needs root and Debian's slurm-wlm and munge; `install()` gets
them through apt. Every daemon is started here and ended here, by process id.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")


def install() -> str | None:
    """Make the programs available; the reason as text where that cannot be done."""
    if all(shutil.which(p) for p in PROGRAMS):
        return None if os.geteuid() == 0 else "Slurm's daemons need root here"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return "Slurm is not installed, and apt-get as root is not available"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-q"], ["apt-get", "install", "-y", "-q", *PACKAGES]):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
        if done.returncode:
            return f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}"
    return None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on right now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class SlurmCluster:
    """Nodes n1..nN, 8 CPUs each as Slurm believes, all on this machine."""

    def __init__(self, directory: Path, num_nodes: int):
        self.directory, self.num_nodes = directory, num_nodes
        self._daemons: list[subprocess.Popen] = []
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}

    def __enter__(self) -> "SlurmCluster":
        for name in ("state", "spool", "run", "log"):
            (self.directory / name).mkdir(parents=True)
        for path in (self.directory, self.directory / "run"):
            path.chmod(0o755)
        host = socket.gethostname().split(".")[0]
        controller, *nodes = free_ports(1 + self.num_nodes)
        d = self.directory
        node_lines = [f"NodeName=n{i + 1} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=1000 State=UNKNOWN" for i, port in enumerate(nodes)]
        (d / "slurm.conf").write_text("\n".join([
            "ClusterName=kd", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={controller}", "SlurmUser=root", "AuthType=auth/munge", f"AuthInfo=socket={d}/run/munge",
            f"StateSaveLocation={d}/state", f"SlurmdSpoolDir={d}/spool/%n", f"SlurmdPidFile={d}/run/%n.pid", f"SlurmctldPidFile={d}/run/slurmctld.pid",
            f"SlurmctldLogFile={d}/log/slurmctld.log", f"SlurmdLogFile={d}/log/%n.log", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "MpiDefault=none",
            "SchedulerType=sched/backfill", "SchedulerParameters=bf_interval=2,sched_interval=2", "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "ReturnToService=2",
            "SlurmdParameters=config_overrides", "KillWait=10", *node_lines,
            f"PartitionName=main Nodes=n[1-{self.num_nodes}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO", ""]))
        key = d / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={d}/run/munge", f"--pid-file={d}/run/munged.pid", f"--log-file={d}/log/munged.log",
                    f"--seed-file={d}/run/munge.seed")
        self.wait("munge's socket", lambda: (d / "run" / "munge").exists(), timeout_s=10)
        self._start("slurmctld", "-D")
        for i in range(self.num_nodes):
            self._start("slurmd", "-D", "-N", f"n{i + 1}")
        self.wait("idle nodes", lambda: self.command("sinfo", "-h", "-o", "%D %T").strip() == f"{self.num_nodes} idle", timeout_s=30)
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(Exception):
            self.command("scancel", "--user", "root")
            self.wait("jobs to end", lambda: not self.command("squeue", "-h").strip(), timeout_s=15)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(5)

    def _start(self, program: str, *args: str) -> None:
        log = open(self.directory / "log" / f"{program}{len(self._daemons)}.out", "w")
        self._daemons.append(subprocess.Popen([shutil.which(program) or f"/usr/sbin/{program}", *args], stdout=log, stderr=subprocess.STDOUT, env=self.environment))

    def command(self, *args: str) -> str:
        """Output of one of Slurm's commands. Errors: AssertionError with what it said."""
        done = subprocess.run(args, capture_output=True, text=True, env=self.environment, timeout=60)
        assert done.returncode == 0, f"{args}: {done.stderr}"
        return done.stdout

    def sbatch(self, script: Path, cwd: Path) -> str:
        """The job's number."""
        return self.command("sbatch", "--parsable", f"--chdir={cwd}", str(script)).strip()

    def job(self, number: str) -> dict[str, str]:
        """`scontrol show job` as a dict (the first component of a heterogeneous job)."""
        text = self.command("scontrol", "show", "job", number).split("\n\n")[0]
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def start_now(self, number: str, restarts: int) -> None:
        """Wait for the job's `restarts`-th requeue and take away the delay that Slurm puts before a requeued job."""
        self.wait(f"requeue {restarts}", lambda: int(self.job(number)["Restarts"]) >= restarts and self.job(number)["JobState"] in ("PENDING", "RUNNING"), timeout_s=60)
        time.sleep(2.1)  # Slurm revokes the credentials of the second in which the job was requeued
        self.wait(f"job {number} to start again", lambda: self._is_started(number), timeout_s=60)

    def _is_started(self, number: str) -> bool:
        """Parts of a heterogeneous job are requeued one after the other, each with a delay of its own: it is taken away until the job runs."""
        if self.job(number)["JobState"] != "PENDING":
            return True
        for part in (number, f"{number}+1"):
            subprocess.run(["scontrol", "update", f"JobId={part}", "StartTime=now"], env=self.environment, capture_output=True)
        time.sleep(1)
        return False

    def wait(self, what: str, condition, timeout_s: float):
        """The first true value of `condition()`. Errors: AssertionError with the daemons' last lines."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):
                value = condition()
                if value:
                    return value
            time.sleep(0.3)
        tails = "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-600:]}" for p in sorted((self.directory / "log").iterdir()))
        raise AssertionError(f"waited {timeout_s} s for {what}\n{tails}")
