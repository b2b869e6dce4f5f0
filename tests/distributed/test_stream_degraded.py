"""stream.on_teacher_loss=ce_only: the only replica is killed, and both ranks of the student finish on cross-entropy, the same micro-batches."""

import json
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("nixl")

from megatron_kd.cli.ports import free_port
from tests.distributed import test_stream_megatron as streams  # noqa: E402

models = streams.models
KILLED_AFTER, AHEAD, ITERS, DEADLINE_S = 3, 2, 9, 30.0
"""Step after which the replica dies; blocks that may be in the ring then; steps of the run; a wait that no block may need."""


def train(rank, world, content, folder):
    """(error or nothing, keys of the micro-batches that this rank gave up). The last rank waits after step KILLED_AFTER until the replica is dead."""
    from megatron_kd.cli.progress import ProgressCallback
    from megatron_kd.stream.receiver import Receiver

    given_up, give_up, end_step = [], Receiver.give_up, ProgressCallback.on_train_step_end

    def counted(receiver, block):
        given_up.append(tuple(block.key))
        give_up(receiver, block)

    def held(callback, context):
        end_step(callback, context)
        if callback._step == KILLED_AFTER:
            (folder / "reached").touch()
            deadline = time.monotonic() + 30
            while not (folder / "killed").exists() and time.monotonic() < deadline:
                time.sleep(0.02)

    Receiver.give_up, ProgressCallback.on_train_step_end = counted, held
    try:
        return streams.train(rank, world, content), given_up
    finally:
        Receiver.give_up, ProgressCallback.on_train_step_end = give_up, end_step


def recipe_of(models: Path, tmp_path: Path) -> dict:
    """One micro-batch a step, so that step and micro-batch are one thing, no evaluation, no checkpoint."""
    content = streams.recipe_of(models, tmp_path / "run", placement="streamed", port=free_port(), iters=ITERS)
    content["train"] |= {"global_batch": 2, "eval_iters": 0, "eval_interval": None, "save": False}
    content["stream"] |= {"on_teacher_loss": "ce_only", "deadline_s": DEADLINE_S, "ring_depth": AHEAD + 1}
    return content


def test_a_killed_teacher_leaves_cross_entropy_on_every_rank_and_is_counted(megatron_ranks, models, tmp_path):
    content, results = recipe_of(models, tmp_path), []
    teacher = streams.start_teacher(content, tmp_path)
    try:
        thread = threading.Thread(target=lambda: results.extend(megatron_ranks.run(train, 2, timeout_s=100, content=content, folder=tmp_path)))
        thread.start()
        deadline = time.monotonic() + 120
        while not (tmp_path / "reached").exists() and time.monotonic() < deadline and thread.is_alive():
            time.sleep(0.02)
        streams.end(teacher, signal.SIGKILL)
        (tmp_path / "killed").touch()
        killed = time.monotonic()
        thread.join(100)
        assert time.monotonic() - killed < DEADLINE_S / 2, "the loss of the last replica is known at once"
    finally:
        streams.end(teacher, signal.SIGKILL)
    assert len(results) == 2, "both ranks must have ended"
    (error, given_up), (other_error, other_given_up) = results
    assert error == other_error == ""
    assert given_up == other_given_up and len(given_up) >= ITERS - 1 - KILLED_AFTER - AHEAD
    steps = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    steps = [record for record in steps if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(ITERS))
    without = [record["step"] for record in steps if record["kd loss"] == 0.0]
    assert without == list(range(ITERS))[-len(given_up):], "the last steps, and only they, had no teacher"
    for record in steps:
        alone = record["step"] in without
        assert record["stream/degraded_blocks"] == (record["step"] - without[0] + 1 if alone else 0)
        assert record["ce loss"] > 0 and (record["kd loss"] > 0) is not alone
    assert steps[-1]["stream/replicas_alive"] == 0 and steps[-1]["stream/replicas_lost"] == 1
