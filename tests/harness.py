"""The one multi-rank harness of the tests: a pool of processes that is started once and reused.

`pool.run(fn, world, **kwargs)` calls the module-level function `fn(rank=, world=, **kwargs)` on `world` processes that share a
fresh gloo group (the default group), and returns the list of their results. Two kinds of pool exist: "torch" (light) and
"megatron" (the CPU runtime and Megatron-Bridge imported once, 6-12 s). Every job has a deadline; a rank that raises or hangs
ends the job with all ranks' tracebacks (stacks for the hanging ones), and the pool is started anew for the next one.
"""

import contextlib
import faulthandler
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait


MAX_THREADS = 200
"""A training leaves a gloo group or two behind, each with a thread that looks for work a hundred times a second: at 300 of them an idle process takes a
quarter of a core."""


class RankFailure(AssertionError):
    """At least one rank raised or passed the deadline; the text holds every rank's traceback."""


def _cleanup() -> None:
    import gc

    import torch.distributed as dist

    if "megatron.core.parallel_state" in sys.modules:
        from tests.megatron_cleanup import cleanup

        cleanup()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _worker(index: int, kind: str, pipe, stack_path: str) -> None:
    stacks = open(stack_path, "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import warnings

    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    if kind == "megatron":
        from megatron_kd.mcore import cpu

        cpu.install()
    pipe.send("ready")
    import torch.distributed as dist
    from datetime import timedelta

    while True:
        job = pipe.recv()
        if job is None:
            return
        fn, world, store, timeout_s, kwargs = job
        os.environ.update(RANK=str(index), WORLD_SIZE=str(world), LOCAL_RANK=str(index), LOCAL_WORLD_SIZE=str(world),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=world, timeout=timedelta(seconds=timeout_s))
            result = (True, fn(rank=index, world=world, **kwargs))
        except BaseException as e:  # noqa: BLE001 -- SystemExit of a trainer is a failure of the job too
            result = (False, "".join(traceback.format_exception(e)))
        pipe.send(result)
        try:
            _cleanup()
        except Exception:  # noqa: BLE001 -- reported with the next job's failure, if any
            traceback.print_exc()


class RankPool:
    """Processes of one kind; grows to the largest world asked for."""

    def __init__(self, kind: str, start_timeout_s: float = 180.0):
        self._kind, self._start_timeout_s = kind, start_timeout_s
        self._procs, self._pipes, self._stacks = [], [], []
        self._dir = tempfile.mkdtemp(prefix="ranks_")
        self._jobs = 0

    def _grow(self, world: int) -> None:
        ctx = mp.get_context("spawn")
        new = []
        for index in range(len(self._procs), world):
            ours, theirs = ctx.Pipe()
            stack = os.path.join(self._dir, f"stacks_{index}")
            proc = ctx.Process(target=_worker, args=(index, self._kind, theirs, stack), daemon=False)
            proc.start()
            theirs.close()
            self._procs.append(proc), self._pipes.append(ours), self._stacks.append(stack)
            new.append(ours)
        for pipe in new:
            if not pipe.poll(self._start_timeout_s) or pipe.recv() != "ready":
                self.close()
                raise RankFailure(f"a {self._kind} rank did not start within {self._start_timeout_s} s")

    def _recycle(self) -> None:
        """End the processes, to be started anew, once one has gathered too many threads."""
        import psutil

        if any(proc.is_alive() and psutil.Process(proc.pid).num_threads() > MAX_THREADS for proc in self._procs):
            self.close()

    def run(self, fn, world: int, *, timeout_s: float = 60.0, **kwargs) -> list:
        """Results of `fn(rank=, world=, **kwargs)` by rank. Errors: RankFailure with every rank's traceback or stack."""
        self._recycle()
        try:
            self._grow(world)
        except (EOFError, OSError) as e:
            self.close()
            raise RankFailure(f"a {self._kind} rank died while starting: {e!r}") from e
        self._jobs += 1
        store = os.path.join(self._dir, f"store_{self._jobs}_{time.monotonic_ns()}")
        for pipe in self._pipes[:world]:
            pipe.send((fn, world, store, timeout_s, kwargs))
        results: dict[int, tuple] = {}
        deadline = time.monotonic() + timeout_s
        grace_s = 5.0  # after one rank failed the others only wait for it: do not sit out the whole deadline
        while len(results) < world and time.monotonic() < deadline:
            pending = [i for i in range(world) if i not in results]
            for pipe in wait([self._pipes[i] for i in pending], timeout=min(1.0, max(0.0, deadline - time.monotonic()))):
                i = self._pipes.index(pipe)
                try:
                    results[i] = pipe.recv()
                except (EOFError, OSError):
                    self._procs[i].join(1)
                    results[i] = (False, f"process died with exit code {self._procs[i].exitcode}")
                if not results[i][0]:
                    deadline = min(deadline, time.monotonic() + grace_s)
        if len(results) == world and all(ok for ok, _ in results.values()):
            return [results[i][1] for i in range(world)]
        text = self._report(results, world)
        self.close()
        raise RankFailure(text)

    def _report(self, results: dict, world: int) -> str:
        for i in range(world):
            if i not in results and self._procs[i].is_alive():
                os.kill(self._procs[i].pid, signal.SIGUSR1)
        time.sleep(0.5)
        parts = []
        for i in range(world):
            if i not in results:
                parts.append(f"--- rank {i}: no answer before the deadline; its stacks:\n{open(self._stacks[i]).read()}")
            elif not results[i][0]:
                parts.append(f"--- rank {i}:\n{results[i][1]}")
        return "\n".join(parts)

    def close(self) -> None:
        """End all processes of the pool, and what they started (saving a checkpoint leaves a manager process that holds the terminal)."""
        import psutil

        started = [child for proc in self._procs if proc.is_alive() for child in psutil.Process(proc.pid).children(recursive=True)]
        for proc in self._procs:
            proc.kill()
            proc.join(5)
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        for pipe in self._pipes:
            pipe.close()
        self._procs, self._pipes, self._stacks = [], [], []
