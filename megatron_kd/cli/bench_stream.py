"""`megatron-kd bench stream`: what the ring carries between two processes of this machine, and where a micro-batch's time goes.

A student process and a teacher process as in a streamed run, the teacher's forward replaced by rows that lie ready. Three figures:
the ring's rate while the student takes as fast as it can, the medians of each step of a block's way (stream/trace.py), and the rate of
NCCL (gloo on a CPU) sending the same bytes between the same two processes. Rows of the first blocks are compared bit by bit.
"""

import argparse
import json
import multiprocessing as mp
import os
import secrets
import shlex
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_kd.cli.ports import free_port
from megatron_kd.errors import ConfigError, TeacherError, rule
from megatron_kd.rows import RowBlock, TokenBlock
from megatron_kd.stream import sizes
from megatron_kd.stream.spec import StudentSpec, TeacherSpec
from megatron_kd.stream.trace import EVENTS, Trace
from megatron_kd.stream.wire import Agreement

WARM_UP = 8
"""Blocks before the clock starts; their rows are checked."""
PATTERNS = 8
"""Different contents of a block."""
MEANINGS = {
    ("posted", "asked"): "student: slot free, request out",
    ("asked", "seen"): "request on the wire, decoded by the teacher",
    ("seen", "begun"): "request waits its turn",
    ("begun", "rows"): "teacher's forward (none here)",
    ("rows", "staged"): "teacher: route, copy, checksum, device",
    ("staged", "started"): "write handed to the transport",
    ("started", "written"): "bytes under way",
    ("written", "noticed"): "message seen by the student",
    ("noticed", "ready"): "student: checksum, books",
    ("ready", "taken"): "rows wait for the student",
    ("taken", "released"): "student's work (none here)",
    ("released", "freed"): "device has read the rows",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `megatron-kd bench stream`."""
    parser.add_argument("--rows", type=int, default=8192, help="rows of a micro-batch (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=4096, help="the teacher's width, 2 bytes each (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=200, help="measured, after the first ones (default: %(default)s)")
    parser.add_argument("--ring-depth", type=int, default=4, help="slots (default: %(default)s)")
    parser.add_argument("--checksum", nargs="+", choices=["off", "on"], default=["off", "on"], help="one measurement each (default: both)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cuda: teacher on GPU 0, student on GPU 1 (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything with device, versions and command")


def run(args: argparse.Namespace) -> int:
    """Exit code 0. Errors: ConfigError; TeacherError where a process failed."""
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        raise ConfigError(rule("GPUs", torch.cuda.device_count(), "two are needed: one sends, one receives", "Use --device cpu"))
    if min(args.rows, args.hidden, args.micro_batches) < 1 or args.ring_depth < 2:
        raise ConfigError(rule("--rows, --hidden, --micro-batches, --ring-depth", (args.rows, args.hidden, args.micro_batches, args.ring_depth),
                               "must be at least 1, 1, 1 and 2", "Give larger numbers"))
    results = [_measure(args, checksum) for checksum in args.checksum]
    for result in results:
        _print(result)
    p2p = results[0]["p2p"]
    print(f"{p2p['backend']} point to point, same bytes: {p2p['gb_per_s']:.2f} GB/s")
    if args.json:
        report = {"results": results, "device": torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {os.cpu_count()} cores", "torch": torch.__version__,
                  "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": shlex.join(["megatron-kd", *sys.argv[1:]])}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _measure(args: argparse.Namespace, checksum: str) -> dict:
    """One run of both processes."""
    context = mp.get_context("spawn")
    settings = {"rows": args.rows, "hidden": args.hidden, "count": args.micro_batches, "depth": args.ring_depth, "device": args.device,
                "checksum": {"off": "none", "on": "sum64" if args.device == "cuda" else "xxh3"}[checksum], "token": secrets.token_bytes(32),
                "hub": ("127.0.0.1", free_port()), "store": free_port()}
    children = {}
    for role in ("student", "teacher"):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(role, settings, theirs), daemon=True)
        process.start()
        theirs.close()
        children[role] = process, mine
    try:
        answers = {role: _receive(role, *child) for role, child in children.items()}
    finally:
        for process, _ in children.values():
            if process.is_alive():
                process.kill()
            process.join(10)
    times = {**answers["student"]["times_s"], **{event: times for event, times in answers["teacher"]["times_s"].items() if times}}
    return {"checksum": settings["checksum"], "rows": args.rows, "hidden": args.hidden, "ring_depth": args.ring_depth, "micro_batches": args.micro_batches,
            "gb_per_s": answers["student"]["gb_per_s"], "block_bytes": args.rows * sizes.row_bytes(args.hidden), "phases_us": _phases(times, args.micro_batches),
            "teacher_cycle_us": _cycle(times["begun"], args.micro_batches), "p2p": answers["student"]["p2p"], "rows_wrong": answers["student"]["rows_wrong"],
            "cpu_us": {role: answer["cpu_us"] for role, answer in answers.items()}}


def _receive(role: str, process, connection) -> dict:
    while not connection.poll(0.2):
        if not process.is_alive() and not connection.poll(0):
            raise TeacherError(f"the {role} process of the measurement ended with exit code {process.exitcode}")
    answer = connection.recv()
    if isinstance(answer, str):
        raise TeacherError(f"the {role} process of the measurement failed: {answer}")
    return answer


def _phases(times_s: dict[str, dict[int, float]], count: int) -> dict[str, float]:
    """Median microseconds between consecutive events of one block, over the measured blocks."""
    measured = range(WARM_UP, WARM_UP + count)
    return {f"{a} -> {b}": statistics.median((times_s[b][seq] - times_s[a][seq]) * 1e6 for seq in measured) for a, b in zip(EVENTS, EVENTS[1:])}


def _cycle(begun_s: dict[int, float], count: int) -> float:
    """Median microseconds from one block's turn at the teacher to the next one's."""
    last = WARM_UP + count - 1
    return statistics.median((begun_s[seq + 1] - begun_s[seq]) * 1e6 for seq in range(WARM_UP, last)) if count > 1 else 0.0


def _print(result: dict) -> None:
    print(f"ring, checksum {result['checksum']}: {result['gb_per_s']:.2f} GB/s, {result['block_bytes'] / 2**20:.2f} MiB a block, "
          f"{result['ring_depth']} slots, one block in {result['block_bytes'] / result['gb_per_s'] / 1e3:.0f} us; wrong rows: {result['rows_wrong']}")
    for (a, b), meaning in MEANINGS.items():
        print(f"  {f'{a} -> {b}':22s} {result['phases_us'][f'{a} -> {b}']:9.0f} us  {meaning}")
    print(f"  {'turn to turn':22s} {result['teacher_cycle_us']:9.0f} us  teacher, from one block's turn to the next one's")
    for role, cpu_us in result["cpu_us"].items():
        print(f"  {f'{role}, processor':22s} {cpu_us:9.0f} us  of all threads, a block")


# ---- the two processes


def _child(role: str, settings: dict, connection) -> None:
    """Entry point of a process; answers with a dict, or with a text where it failed."""
    torch.set_num_threads(1)
    try:
        answer = {"student": _student, "teacher": _teacher}[role](settings)
    except BaseException as e:  # noqa: BLE001 -- told to the parent
        answer = f"{type(e).__name__}: {e}"
    connection.send(answer)
    connection.close()
    os._exit(0)  # NIXL's threads end with the process


def _device(settings: dict, index: int) -> torch.device:
    if settings["device"] == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _agreement(settings: dict) -> Agreement:
    return Agreement(fingerprint="bench", head_transform="none", hidden_size=settings["hidden"])


def _block(settings: dict, step: int) -> TokenBlock:
    rows = settings["rows"]
    return TokenBlock(tokens_bs=torch.full((1, rows), step), loss_mask_bs=torch.ones(1, rows), step=step, micro_batch=0)


def _contents(settings: dict, step: int, device: torch.device) -> torch.Tensor:
    """bfloat16 [rows, hidden] that tell patterns, rows and columns apart."""
    row_N = torch.arange(settings["rows"], device=device) % 127 + step % PATTERNS
    return (row_N[:, None] * torch.arange(1, settings["hidden"] + 1, device=device)[None] % 251).bfloat16()


def _teacher(settings: dict) -> dict:
    from megatron_kd.stream.nixl import NixlOutbox
    from megatron_kd.stream.publisher import Publisher, serve_single
    from megatron_kd.stream.route import Side
    from megatron_kd.stream.sender import RowSender

    device, trace, last = _device(settings, 0), Trace(), WARM_UP + settings["count"] - 1
    prepared = [_contents(settings, step, device) for step in range(PATTERNS)]
    spec = TeacherSpec(rendezvous=settings["hub"], token=settings["token"], name="bench", agreement=_agreement(settings), context_length=settings["rows"], retry_s=0.1)
    cpu_s = []

    def rows_of(block: TokenBlock) -> RowBlock:
        if block.step in (WARM_UP, last):
            cpu_s.append(time.process_time())
        return RowBlock(hidden_NH=prepared[block.step % PATTERNS], row_ids_N=block.row_ids_N, hash=block.hash)

    with Publisher(spec, trace) as publisher:
        sender = RowSender(NixlOutbox(), spec.agreement, teacher=Side(), teacher_rank=0, trace=trace)
        serve_single(publisher, sender, rows_of, stop=lambda: last in trace.times_s["written"])
    _point_to_point(settings, 0, prepared[0])
    return {"times_s": trace.times_s, "cpu_us": (cpu_s[-1] - cpu_s[0]) / max(1, settings["count"] - 1) * 1e6}


def _student(settings: dict) -> dict:
    from megatron_kd.stream.nixl import NixlInbox
    from megatron_kd.stream.receiver import Receiver
    from megatron_kd.stream.rendezvous import Hub

    device, trace, count, ahead = _device(settings, 1), Trace(), settings["count"], settings["depth"] - 1
    hub = Hub(settings["hub"], settings["token"], "bench")
    spec = StudentSpec(rendezvous=hub.address, token=settings["token"], hidden_size=settings["hidden"], fingerprint="bench", sequence_length=settings["rows"],
                       ring_depth=settings["depth"], device=device, checksum=settings["checksum"], deadline_s=60.0, join_deadline_s=60.0)
    blocks, wrong, began = [_block(settings, step) for step in range(WARM_UP + count)], 0, 0.0
    expected = _contents(settings, 0, device)
    with Receiver(spec, NixlInbox(), trace) as receiver:
        receiver.wait_for_teachers(1)
        for block in blocks[:ahead]:
            receiver.post(block)
        for step, block in enumerate(blocks):
            if step == WARM_UP:
                began, cpu_began_s = time.perf_counter(), time.process_time()
            if step + ahead < len(blocks):
                receiver.post(blocks[step + ahead])
            rows = receiver.take(block)
            if step < WARM_UP:
                wrong += int((rows.hidden_NH != _contents(settings, step, device)).any(dim=1).sum())
            receiver.release(block)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began_s
        while device.type == "cuda" and len(trace.times_s["freed"]) < len(blocks):
            time.sleep(0.001)
    hub.close()
    p2p = _point_to_point(settings, 1, expected)
    return {"gb_per_s": count * settings["rows"] * sizes.row_bytes(settings["hidden"]) / seconds / 1e9, "rows_wrong": wrong, "times_s": trace.times_s, "p2p": p2p,
            "cpu_us": cpu_s / count * 1e6}


def _point_to_point(settings: dict, rank: int, rows: torch.Tensor) -> dict:
    """GB/s of send and receive of one block's bytes, one after the other."""
    backend = "nccl" if rows.is_cuda else "gloo"
    store = dist.TCPStore("127.0.0.1", settings["store"], 2, is_master=rank == 1)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, device_id=rows.device if rows.is_cuda else None)
    count = max(3, min(settings["count"], 50))
    for _ in range(2):
        if rows.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            dist.send(rows, 1) if rank == 0 else dist.recv(rows, 0)
        if rows.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    dist.destroy_process_group()
    return {"backend": backend, "gb_per_s": count * rows.nbytes / seconds / 1e9}
