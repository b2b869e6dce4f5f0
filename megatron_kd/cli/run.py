"""Start a recipe's teacher replicas and its student on this machine, and supervise them: one command, prefixed output, one exit code.

    megatron-kd run recipes/demo_smollm2.yaml train.iters=10
When one side dies, the other is ended, and the last line says which died first and how. For several machines: `megatron-kd launch`.
"""

import argparse
import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_kd.cli.ports import free_port
from megatron_kd.config.load import load
from megatron_kd.config.schema import Recipe, StreamConfig
from megatron_kd.errors import ConfigError, rule
from megatron_kd.stream.channel import TOKEN_VARIABLE

GRACE_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Recipe, overrides, sizes of the two worlds."""
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="given to both sides")
    parser.add_argument("--student-ranks", type=int, help="processes of the student (default: the least that its layout takes)")


@dataclass(slots=True)
class Side:
    """One started world."""

    name: str
    process: subprocess.Popen
    ended_s: float | None = None


def run(args: argparse.Namespace) -> int:
    """Supervise; returns the student's exit code, or 1 where a teacher died first."""
    recipe = load(args.recipe, args.overrides)
    if recipe.teacher.placement != "streamed":
        raise ConfigError(rule("teacher.placement", recipe.teacher.placement, "there is one world only", "Use `megatron-kd train`, or set teacher.placement=streamed"))
    environment = dict(os.environ)
    if not recipe.stream.token_file:
        environment.setdefault(TOKEN_VARIABLE, secrets.token_hex(32))
    return Supervisor(recipe, args, environment).run()


class Supervisor:
    """Starts the sides, relays their output line by line, ends them together."""

    def __init__(self, recipe: Recipe, args: argparse.Namespace, environment: dict[str, str]):
        self._environment, self._lock = environment, threading.Lock()
        student_ranks = args.student_ranks or recipe.student.layout.min_world
        teacher_ranks = recipe.teacher.world_size or (recipe.teacher.layout or recipe.student.layout).min_world
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        self._devices = iter(visible.split(",") if visible else map(str, range(10_000))) if recipe.device == "cuda" else None
        arguments = [args.recipe, *args.overrides, f"stream.rendezvous={rendezvous_for(recipe)}"]
        self._readers: list[threading.Thread] = []
        self._stop_signal: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.student = self._start("student", student_ranks, ["train", *arguments])
        names = ["teacher"] if recipe.stream.replicas == 1 else [f"teacher{i}" for i in range(recipe.stream.replicas)]
        self.teachers = [self._start(name, teacher_ranks, ["teach", *arguments, "--name", name]) for name in names]

    def _start(self, name: str, num_ranks: int, command: list[str]) -> Side:
        environment = dict(self._environment)
        if self._devices is not None:
            devices = [device for _, device in zip(range(num_ranks), self._devices)]
            if len(devices) < num_ranks:
                raise ConfigError(rule("CUDA_VISIBLE_DEVICES", self._environment.get("CUDA_VISIBLE_DEVICES"), f"has no {num_ranks} GPUs left for {name}",
                                       "Give more GPUs, or use `megatron-kd launch` for several machines"))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        launcher = [sys.executable, "-m"] + (["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"] if num_ranks > 1 else [])
        process = subprocess.Popen([*launcher, "megatron_kd", *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1,
                                   errors="replace", start_new_session=True, preexec_fn=_end_with_parent)
        reader = threading.Thread(target=self._relay, args=(name, process), daemon=True)
        reader.start()
        self._readers.append(reader)
        return Side(name, process)

    def _relay(self, name: str, process: subprocess.Popen) -> None:
        for line in process.stdout:
            with self._lock:
                print(f"[{name}] {line}", end="", flush=True)

    def _say(self, text: str) -> None:
        with self._lock:
            print(f"[run] {text}", flush=True)

    def _on_signal(self, number: int, _frame) -> None:
        self._stop_signal = number

    def run(self) -> int:
        """Wait for the first end, then end the rest."""
        sides = [self.student, *self.teachers]
        told_s = None
        while self.student.process.poll() is None:
            if self._stop_signal is not None and told_s is None:
                self._say(f"stopping on signal {self._stop_signal}")
                told_s = time.monotonic()
                self._signal(self.student, signal.SIGTERM)
            if told_s is not None and time.monotonic() - told_s > 2 * GRACE_S:
                self._signal(self.student, signal.SIGKILL)
            for side in self.teachers:
                if side.ended_s is None and side.process.poll() is not None:
                    side.ended_s = time.monotonic()
                    self._say(f"{side.name} ended: {describe(side.process.returncode)}; the student decides by stream.on_teacher_loss")
            if all(side.ended_s for side in self.teachers) and told_s is None and time.monotonic() - max(side.ended_s for side in self.teachers) > GRACE_S:
                self._say(f"no teacher is left and the student went on for {GRACE_S:.0f} s: ending it")
                told_s = time.monotonic()
                self._signal(self.student, signal.SIGTERM)
            time.sleep(0.1)
        code = self.student.process.returncode
        for side in self.teachers:
            self._end(side)
        for reader in self._readers:
            reader.join(5)
        died = [side for side in sides if side.ended_s]
        if died:
            first = min(died, key=lambda side: side.ended_s)
            self._say(f"{first.name} died first: {describe(first.process.returncode)}; student: {describe(code)}")
        elif code:
            self._say(f"student failed: {describe(code)}")
        return code if 0 <= code < 256 else 1

    def _signal(self, side: Side, number: int) -> None:
        """To the ranks themselves: torchrun, told to end, would print a traceback and give them 30 s."""
        if side.process.poll() is None:
            for pid in ranks_of(side.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _end(self, side: Side) -> None:
        """A polite end, then a hard one."""
        if side.process.poll() is not None:
            return
        self._signal(side, signal.SIGTERM)
        try:
            side.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._say(f"{side.name} did not end within {GRACE_S:.0f} s: killed")
            self._signal(side, signal.SIGKILL)
            side.process.kill()
            side.process.wait(10)


def rendezvous_for(recipe: Recipe) -> str:
    """The recipe's address; a free local port where it is the default one, so that two runs on one machine do not meet."""
    if recipe.stream.rendezvous != StreamConfig().rendezvous:
        return recipe.stream.rendezvous
    return f"127.0.0.1:{free_port()}"


def ranks_of(pid: int) -> list[int]:
    """Processes that a launcher of ours has started, or the process itself where it launches nothing (Linux)."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ranks = [int(child) for child in children if b"megatron_kd" in Path(f"/proc/{child}/cmdline").read_bytes()]
        return ranks or [pid]
    return [pid]


def _end_with_parent() -> None:
    """In the child: be told to end should this supervisor be killed (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def describe(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "ended normally" if code == 0 else f"exit code {code}"
