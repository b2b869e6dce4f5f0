"""recipes/nemo_run/launch.py with NeMo-Run itself: the local executor trains a recipe's small twin, failures reach the caller, Slurm jobs are written."""

import functools
import json
import subprocess

import pytest

from tests import nemo_run
from tests.nemo_run import ROOT


@pytest.fixture
def launch(tmp_path):
    """launch(*arguments) -> the finished process, started in a directory of its own."""
    return functools.partial(nemo_run.launch, tmp_path)


def commands(done: subprocess.CompletedProcess) -> list[str]:
    """What each job of a dry run would run, in order."""
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split("-m megatron_kd ")[1] for line in done.stdout.splitlines() if "-m megatron_kd " in line]


def test_the_local_executor_trains_the_small_twin_on_two_ranks(launch, tmp_path):
    done = launch(str(ROOT / "recipes/llama_8b_3b_8k_online.yaml"), "--local", "--gpus", "2", "--shrink", "train.iters=2")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    output = tmp_path / "out/shrink/llama_8b_3b_8k_online/out"
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["steps"], summary["placement"], summary["layout"]) == (2, "colocated", "tp=1 dp=2")
    assert "held-out after 2 steps" in done.stdout, "progress of the job is shown"


def test_a_job_that_fails_fails_the_launcher_and_shows_why(launch):
    done = launch(str(ROOT / "recipes/llama_8b_3b_8k_online.yaml"), "--local", "--gpus", "1", "train.lrr=3")
    assert done.returncode == 1 and "student FAILED" in done.stderr
    assert "Did you mean train.lr" in done.stdout + done.stderr


def test_a_streamed_recipe_is_one_slurm_job_for_the_student_and_one_for_each_replica(launch):
    recipe = str(ROOT / "recipes/qwen35_35b_9b_streamed.yaml")
    refused = launch(recipe, "--local")
    assert refused.returncode == 1 and "megatron-kd run" in refused.stderr
    jobs = commands(launch(recipe, "--slurm", "--student-nodes", "2", "--replicas", "2", "--student-host", "node17", "--token", "SECRET", "--dryrun"))
    assert [job.split()[0] for job in jobs] == ["train", "teach", "teach"]
    assert all("stream.rendezvous=node17:29790" in job and "stream.replicas=2" in job for job in jobs)
    assert [r"stream.bind=\${oc.env:SLURMD_NODENAME}" in job for job in jobs] == [True, False, False], "each rank of the student listens on its own node"


def test_a_cached_recipe_builds_its_cache_first(launch):
    jobs = commands(launch(str(ROOT / "recipes/qwen35_35b_9b_cached.yaml"), "--slurm", "--dryrun"))
    assert [job.split(" /")[0] for job in jobs] == ["cache build", "train"]
