"""Teacher and student processes of the stream over NIXL, for tests that kill, stop and disconnect them.

Children come from a fork server that has imported torch and nixl once (no agent exists there), so that each starts in a fraction of
a second. Rows are those of tests.stream_peers.rows_of; a student's result is a chain of hashes over all rows in order, which
`chain` computes without any process.
"""

import multiprocessing as mp
import os
import random
import subprocess
import time
import traceback

import torch
import xxhash

from tests.stream_peers import AGREED, TOKEN, block, check_rows, rows_of, student_spec, teacher_spec


def context():
    """The fork server's context."""
    ctx = mp.get_context("forkserver")
    ctx.set_forkserver_preload(["tests.stream_process", "nixl._api"])
    return ctx


class Child:
    """A process that runs `fn(report, **kwargs)`; `report(...)` there becomes an event here."""

    def __init__(self, fn, **kwargs):
        ctx = context()
        self._conn, theirs = ctx.Pipe(duplex=False)
        self.process = ctx.Process(target=_run, args=(fn, theirs, kwargs), daemon=True)
        self.process.start()
        theirs.close()
        self.events: list = []

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def wait(self, name: str, *, timeout_s: float = 30.0, at_least: int | None = None):
        """The first event of this name (and value >= at_least) from now on. AssertionError at the deadline or on the child's death."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if self._conn.poll(0.05):
                    event = self._conn.recv()
                    self.events.append(event)
                    if event[0] == name and (at_least is None or event[1] >= at_least):
                        return event[1]
                    if event[0] == "raised" and name != "raised":
                        raise AssertionError(f"child raised while waiting for {name!r}:\n{event[1]}")
            except EOFError as e:
                raise AssertionError(f"child ended (exit code {self.process.exitcode}) while waiting for {name!r}; events: {self.events[-5:]}") from e
        raise AssertionError(f"no {name!r} within {timeout_s} s; events: {self.events[-5:]}")

    def signal(self, number: int) -> None:
        """Send a signal to this process only."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill what is left."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self._conn.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


def _run(fn, conn, kwargs):
    torch.set_num_threads(1)
    os.environ.update(kwargs.pop("env", {}))
    if (namespace := kwargs.pop("namespace", None)) is not None:
        _enter_network(namespace)
    try:
        fn(lambda *event: conn.send(event), **kwargs)
    except BaseException as e:  # noqa: BLE001 -- an event for the parent
        conn.send(("raised", f"{type(e).__name__}: {e}", traceback.format_exc()))
        os._exit(1)
    os._exit(0)  # NIXL's threads end with the process


def _enter_network(namespace: str) -> None:
    """Join a network namespace, with a /sys that shows its devices (UCX looks them up there), as `ip netns exec` does."""
    with open(f"/var/run/netns/{namespace}") as handle:
        os.setns(handle.fileno(), os.CLONE_NEWNET)
    os.unshare(os.CLONE_NEWNS)
    for command in (["mount", "--make-rslave", "/"], ["umount", "-l", "/sys"], ["mount", "-t", "sysfs", "sysfs", "/sys"]):
        subprocess.run(command, check=True, capture_output=True)


def rss_mib() -> float:
    """Resident memory of this process, MiB."""
    with open("/proc/self/statm") as handle:
        return int(handle.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def teacher(report, *, hub, name="A", delay_s=0.0, hidden=AGREED.hidden_size, announce_writes=False, seed=0, **spec):
    """Serve until killed. Events: joined/left n students, writing seq."""
    from megatron_kd.stream.nixl import NixlOutbox
    from megatron_kd.stream.publisher import Publisher, serve_single
    from megatron_kd.stream.route import Side
    from megatron_kd.stream.sender import RowSender
    from megatron_kd.stream.wire import Agreement

    rng = random.Random(seed)
    agreement = Agreement(fingerprint=AGREED.fingerprint, head_transform="none", hidden_size=hidden)
    publisher = Publisher(teacher_spec(hub, name, agreement=agreement, **{"context_length": 1 << 20} | spec))
    sender = RowSender(NixlOutbox(), agreement, teacher=Side(), teacher_rank=0)
    state = {"students": 0}

    def rows(b):
        time.sleep(rng.random() * delay_s)
        result = rows_of(b, hidden)
        if announce_writes:
            report("writing", b.step)
        return result

    def stop():
        if publisher.num_students != state["students"]:
            state["students"] = publisher.num_students
            report("students", state["students"], publisher.num_queued, rss_mib())
        return False

    serve_single(publisher, sender, rows, stop=stop)


def student(report, *, port=0, host="127.0.0.1", steps, first=0, delay_s=0.0, hidden=AGREED.hidden_size, shape=(2, 16), ahead=2, teachers=1, start=0, settle_s=0.0, **spec):
    """Host a hub, take `steps` blocks from number `first`, chain their hashes. Events: hub port, taken step, done {...}."""
    from megatron_kd.stream.nixl import NixlInbox
    from megatron_kd.stream.receiver import Receiver
    from megatron_kd.stream.rendezvous import Hub

    rng = random.Random(first + 1)
    hub = Hub((host, port), TOKEN, "run-1")
    report("hub", hub.address)
    b, s = shape
    spec = student_spec(hub.address, **{"hidden_size": hidden, "sequence_length": s, "ring_depth": ahead + 1, "bind": host, "heartbeat_s": 1.0} | spec)
    with Receiver(spec, NixlInbox()) as receiver:
        receiver.wait_for_teachers(teachers)
        blocks, digest, memory = {}, start, []
        for step in range(first, first + steps + ahead):
            if step < first + steps:
                blocks[step] = block(step, b=b, s=s)
                receiver.post(blocks[step])
            if step - ahead >= first:
                want = blocks.pop(step - ahead)
                rows = receiver.take(want)
                check_rows(rows, want, hidden)
                time.sleep(rng.random() * delay_s)
                digest = link(digest, rows.hidden_NH)
                receiver.release(want)
                report("taken", step - ahead, digest)
                if (step - ahead - first) % 100 == 99:
                    memory.append(rss_mib())
        deadline = time.monotonic() + settle_s
        while receiver.metrics()["stream/quarantined_slots"] and time.monotonic() < deadline:
            time.sleep(0.05)
        counters = {name: getattr(receiver.counters, name) for name in receiver.counters.__slots__}
        report("done", {"chain": digest, "memory": memory, "allocated": receiver.allocated_bytes, "refused": receiver.refused, **counters, **receiver.metrics()})
    hub.close()
    report("closed")


def link(digest: int, rows_NH: torch.Tensor) -> int:
    """The chain with one more block."""
    return xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little") + rows_NH.contiguous().view(torch.uint8).numpy().tobytes())


def chain(first: int, steps: int, *, hidden=AGREED.hidden_size, shape=(2, 16), start=0) -> int:
    """What an undisturbed student's chain must be."""
    digest = start
    for step in range(first, first + steps):
        digest = link(digest, rows_of(block(step, b=shape[0], s=shape[1]), hidden).hidden_NH)
    return digest
