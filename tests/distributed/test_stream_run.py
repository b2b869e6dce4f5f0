"""`megatron-kd run`: both sides under one command, one exit code, and the name of the side that died."""

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

from tests.distributed.test_stream_megatron import models, recipe_of  # noqa: E402, F401 -- the fixture


def start(path: Path, folder: Path) -> tuple[subprocess.Popen, list[str]]:
    """The supervisor, and its lines as they come."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MEGATRON_KD_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    process = subprocess.Popen([sys.executable, "-m", "megatron_kd", "run", str(path)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True).start()
    return process, lines


def test_run_starts_both_sides_and_says_which_died(models, tmp_path):  # noqa: F811
    content = recipe_of(models, tmp_path / "out", placement="streamed", port=0, iters=2000)
    content["student"]["layout"] = content["teacher"]["layout"] = {"tp": 1}
    del content["stream"]["rendezvous"], content["stream"]["token_file"]  # both are made by the command
    content["train"] |= {"save": False, "eval_interval": 100_000}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    process, lines = start(path, tmp_path)
    try:
        history, deadline = tmp_path / "out" / "history.jsonl", time.monotonic() + 90
        while time.monotonic() < deadline and process.poll() is None and not (history.exists() and history.read_text().count('"step"') > 5):
            time.sleep(0.05)
        (teacher,) = [child for child in psutil.Process(process.pid).children(recursive=True) if "teach" in child.cmdline()]
        teacher.send_signal(signal.SIGKILL)
        assert process.wait(40) == 1
        text = "".join(lines)
        assert "[teacher] teacher replica teacher serves" in text and "[student]" in text
        assert "TeacherLost: teacher replica 'teacher': its connection broke" in text
        assert text.splitlines()[-1] == "[run] teacher died first: killed by SIGKILL; student: exit code 1", text
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
