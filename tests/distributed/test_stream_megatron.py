"""Teacher and student as two Megatron worlds: streamed runs are colocated runs, bit for bit, also across the loss of the teacher."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import yaml

pytest.importorskip("nixl")

from megatron_kd.cli.ports import free_port
from megatron_kd.config.load import build  # noqa: E402

LLAMA = {"model_type": "llama", "hidden_size": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1, "intermediate_size": 1, "num_hidden_layers": 4,
         "max_position_embeddings": 512, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
LAYOUT = {"tp": 2, "sequence_parallel": True}


def recipe_of(models: Path, out: Path, *, placement: str, port: int, iters: int) -> dict:
    """Student and teacher under TP=2 with sequence parallelism, fp32 rows, one thread a rank: the bitwise condition."""
    content = {"name": "tiny", "device": "cpu", "output_dir": str(out), "student": {"model": str(models / "student"), "precision": "fp32", "layout": LAYOUT},
               "teacher": {"model": str(models / "teacher"), "precision": "fp32", "placement": placement}, "loss": {"kd_weight": 0.8, "ce_weight": 0.2},
               "data": {"kind": "text", "text": str(models / "text.jsonl"), "seq_length": 32, "held_out": 0.2},
               "train": {"iters": iters, "global_batch": 4, "micro_batch": 2, "lr": 0.01, "lr_decay": "constant", "eval_iters": 1, "eval_interval": 20, "tensorboard": False,
                         "save_interval": 10, "log_interval": 1, "threads_per_rank": 1},
               "stream": {"rows": "fp32", "rendezvous": f"127.0.0.1:{port}", "token_file": str(models / "token"), "deadline_s": 30.0, "heartbeat_s": 3.0, "ring_depth": 3}}
    if placement == "streamed":
        content["teacher"]["layout"] = LAYOUT
    return content


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A teacher twice as wide as its student, text, and the shared secret."""
    from megatron_kd.convert.tiny import tiny_config, write_tiny_model

    folder = tmp_path_factory.mktemp("stream")
    write_tiny_model(tiny_config(LLAMA, num_layers=4, scale=2), folder / "teacher", seed=1)
    write_tiny_model(tiny_config(LLAMA, num_layers=2), folder / "student", seed=2)
    with (folder / "text.jsonl").open("w") as f:
        for i in range(40):
            f.write(json.dumps({"text": f"Document {i}. " + " ".join(str(j * (i + 3)) for j in range(40))}) + "\n")
    (folder / "token").write_text("a secret of the tests, long enough")
    (folder / "token").chmod(0o600)
    return folder


def train(rank, world, content, raises: bool = False) -> str:
    """One student rank; the text of the error that ended it, or nothing. `raises` ends the job by it: the pool then ends the ranks that wait in a collective
    for this one, as a launcher does."""
    from megatron_kd.cli import logs
    from megatron_kd.cli.train import train as run
    from megatron_kd.errors import KDError

    recipe = build(content, [])
    with logs.to_file(Path(recipe.output_dir) / f"rank{rank}.log"):
        try:
            run(recipe, rank=rank, world=world, terminal=io.StringIO() if rank == world - 1 else None)
        except KDError as e:
            if raises:
                raise
            return f"{type(e).__name__}: {e}"
    return ""


def numbers(out: Path) -> list[tuple]:
    """Every number of the history that the training itself makes, in order; the last record of each step."""
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    found = {}
    for line in lines:
        found[line["kind"], line["step"]] = tuple(value for key, value in sorted(line.items()) if key != "seconds" and "/" not in key)
    return sorted(found.items())


def start_teacher(content: dict, folder: Path) -> subprocess.Popen:
    """`megatron-kd teach` under torchrun, in a session of its own."""
    path = folder / "teacher.yaml"
    path.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "megatron_kd", "teach", str(path), "--name", "replica-a"]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "MEGATRON_KD_CACHE": str(folder / "cache")}, start_new_session=True)


def end(process: subprocess.Popen, number: int) -> None:
    """Signal the ranks that a launcher started, and wait for it."""
    if process.poll() is None:
        for rank in psutil.Process(process.pid).children(recursive=True):
            if "teach" in rank.cmdline():
                rank.send_signal(number)
        process.wait(40)


def test_streamed_equals_colocated_bit_for_bit_also_after_the_teacher_was_killed_and_the_run_resumed(megatron_ranks, models, tmp_path):
    port = free_port()
    broken = recipe_of(models, tmp_path / "broken", placement="streamed", port=port, iters=40)
    teacher = start_teacher(broken, tmp_path)
    try:
        colocated = recipe_of(models, tmp_path / "colocated", placement="colocated", port=port, iters=40)
        assert megatron_ranks.run(train, 2, timeout_s=120, content=colocated) == ["", ""]
        want = numbers(tmp_path / "colocated")
        assert len(want) >= 42, "40 steps, and evaluations before, within and after them"

        # the replica is killed in the middle of the run, which ends in time and names it
        errors = []

        def run_until_it_breaks():
            try:
                errors.append(megatron_ranks.run(train, 2, timeout_s=80, content=broken, raises=True))
            except BaseException as e:  # noqa: BLE001 -- compared below
                errors.append([str(e)])
                print(e)

        thread = threading.Thread(target=run_until_it_breaks)
        thread.start()
        history, deadline = tmp_path / "broken" / "history.jsonl", time.monotonic() + 90
        while time.monotonic() < deadline and thread.is_alive() and not (history.exists() and len(history.read_text().splitlines()) > 13):
            time.sleep(0.02)
        end(teacher, signal.SIGKILL)
        killed = time.monotonic()
        thread.join(60)
        assert time.monotonic() - killed < 20
        assert all("TeacherLost" in text and "replica-a" in text for text in errors[0]), errors
        before = numbers(tmp_path / "broken")
        assert 10 < len(before) < len(want) and all(pair in want for pair in before)

        teacher = start_teacher(broken, tmp_path)
        assert megatron_ranks.run(train, 2, timeout_s=120, content=broken) == ["", ""]
        assert numbers(tmp_path / "broken") == want
        end(teacher, signal.SIGTERM)
        assert teacher.returncode == 0, "told to stop, a replica ends normally"
    finally:
        end(teacher, signal.SIGKILL)
        teacher.wait(20)
