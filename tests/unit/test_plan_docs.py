"""docs/planner.md: its commands run as written, and its statements about published work are what the planner says."""

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_kd.cli.main import main
from megatron_kd.layout import ParallelLayout
from megatron_kd.plan.balance import Rates
from megatron_kd.plan.dense import DENSE_LOSSES
from megatron_kd.plan.gpus import gpu
from megatron_kd.plan.job import Job
from megatron_kd.plan.models import load_model
from megatron_kd.plan.predict import prediction, read_runs, run_job, table
from megatron_kd.plan.search import Limits, search

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.S) for line in block.splitlines() if line.startswith("megatron-kd ")]
NOTHING_FITS = "--tp 2 --pp 1 --ep 4 --loss modelopt --payload hidden"


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_docs_runs_as_written(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("docs", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    code = main(shlex.split(command)[1:])
    assert code == (3 if NOTHING_FITS in command else 0), capsys.readouterr().err


def test_table_of_predictions_is_the_committed_file():
    results = json.loads((ROOT / "docs" / "benchmarks" / "plan_predictions.json").read_text(encoding="utf-8"))["runs"]
    assert table(results) in TEXT
    assert sum(entry["held_out"] for entry in results) >= 2 and len(results) >= 10


def test_peaks_measured_with_full_logits_are_within_the_tolerance_of_what_is_predicted_now():
    content = read_runs(ROOT / "docs" / "benchmarks" / "dense_runs.json")
    now = {run["name"]: prediction(run, run_job(run, content)[1])["max_memory_allocated"] / 2**30 for run in content["runs"]}
    rows = re.findall(r"^\| (\w+_dense|\w+_modelopt) \| ([\d.]+) \| ([\d.]+) \| \S+ \|$", TEXT, re.M)
    assert len(rows) >= 3
    for name, predicted, measured in rows:
        assert now[name] == pytest.approx(float(predicted), abs=0.01), name
        assert -0.03 < now[name] / float(measured) - 1 < 0.08, name


def pair(teacher: str, student: str, card: str, seq: int) -> Job:
    """A pair to search layouts for."""
    return Job(student=load_model(f"qwen3.5-{student}"), teacher=load_model(f"qwen3.5-{teacher}"), placement="colocated", gpu=gpu(card),
               layout=ParallelLayout(), seq=seq, global_batch=256)


@pytest.mark.parametrize("teacher, student, card, gpus, seq, max_cp, colocated, streamed", [
    ("122b-a10b", "27b", "h100-80", 8, 8192, 1, False, False),
    ("122b-a10b", "27b", "h100-80", 16, 8192, 1, True, True),
    ("397b-a17b", "27b", "h100-80", 16, 8192, 1, False, False),
    ("397b-a17b", "27b", "h200-141", 8, 8192, 1, False, False),
    ("397b-a17b", "27b", "h100-80", 32, 32768, 4, False, True),
    ("397b-a17b", "9b", "h100-80", 32, 32768, 4, False, True),
])
def test_statement_about_a_pair_is_what_the_planner_says(teacher, student, card, gpus, seq, max_cp, colocated, streamed):
    template = pair(teacher, student, card, seq)
    got = [bool(search(template, placement, gpus, Rates(), limits=Limits(max_cp=max_cp), keep=1).best) for placement in ("colocated", "streamed")]
    assert got == [colocated, streamed]
    assert search(template, "cached", gpus, Rates(), limits=Limits(max_cp=max_cp), keep=1).best


def test_published_gpt_oss_layout_fits_one_node_fused_and_not_dense():
    model = load_model("gpt-oss-20b")
    base = dict(student=model, teacher=model, placement="cached", gpu=gpu("h200-141"), layout=ParallelLayout(), seq=32768, global_batch=32)
    here = Limits(tp=2, pp=1, ep=4)
    fused = search(Job(**base), "cached", 8, Rates(), limits=here).best[0].job
    assert (fused.recompute, fused.micro_batch) == ("none", 1)
    for loss in DENSE_LOSSES:
        assert not search(Job(**base, loss=loss, payload="hidden"), "cached", 8, Rates(), limits=here).best
    assert all(candidate.job.layout.tp >= 4 for candidate in search(Job(**base, loss="modelopt", payload="hidden"), "cached", 8, Rates(),
                                                                    keep=50).best if candidate.job.layout.pp == 1)
