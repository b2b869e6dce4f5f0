"""The job script on a real Slurm of three nodes on this machine: its logic with a stand-in program, then the small twin of a streamed recipe."""

import json
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_kd.cli.main import main
from megatron_kd.cli.ports import free_port
from megatron_kd.cli.slurm_script import SlurmJob, slurm_script
from megatron_kd.convert.shrink import shrink
from tests.nemo_run import launch
from tests.slurm_cluster import SlurmCluster, install

ROOT = Path(__file__).parents[2]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
STAND_IN = """#!/bin/bash
# Attempt 0 is told to stop, attempt 1 is killed, attempt 2 ends well. A teacher serves until it is ended.
echo "$1 attempt=${SLURM_RESTART_COUNT:-0} rank=$RANK/$WORLD_SIZE local=$LOCAL_RANK node=$SLURMD_NODENAME secret=${#MEGATRON_KD_TOKEN} $*"
if [ $1 = teach ]; then sleep 3600 & wait; fi
trap 'echo saved; exit 75' TERM
touch started-${SLURM_RESTART_COUNT:-0}
for i in $(seq 600); do
  [ ${SLURM_RESTART_COUNT:-0} = 1 ] && [ $RANK = 1 ] && [ -e kill-now ] && kill -9 $$
  [ ${SLURM_RESTART_COUNT:-0} = 2 ] && exit 0
  sleep 0.1
done
exit 1
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Three idle nodes."""
    reason = install()
    if reason:
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", 3) as cluster:
        yield cluster


def submit(slurm, folder: Path, text: str) -> str:
    (folder / "job.sbatch").write_text(text)
    (folder / "out").mkdir(exist_ok=True)
    return slurm.sbatch(folder / "job.sbatch", folder)


def log(folder: Path, name: str) -> str:
    """All attempts of one rank."""
    path = folder / "out/logs/slurm" / name
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("heterogeneous", [False, True], ids=["one_allocation", "heterogeneous"])
def test_a_job_survives_preemption_a_kill_and_a_drained_teacher_node(slurm, tmp_path, heterogeneous):
    (tmp_path / "program.sh").write_text(STAND_IN)
    job = SlurmJob(name="stand_in", recipe="r.yaml", output_dir="out", student_nodes=1, student_ranks_per_node=2, replicas=2, heterogeneous=heterogeneous,
                   program="bash program.sh", time="00:10:00")
    number = submit(slurm, tmp_path, slurm_script(job))
    slurm.wait("attempt 0", lambda: (tmp_path / "started-0").exists() and "teach" in log(tmp_path, "teacher-1-0.log"), 30)
    node = log(tmp_path, "teacher-1-0.log").split("node=")[1].split()[0]
    slurm.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    slurm.command("scancel", "--signal=KILL", (tmp_path / "out/logs/slurm/teacher-1.step").read_text().strip())
    slurm.wait("the replica to come back on its drained node", lambda: log(tmp_path, "teacher-1-0.log").count("attempt=0") == 2, 40)
    assert slurm.job(number)["JobState"] == "RUNNING"
    slurm.command("scontrol", "update", f"NodeName={node}", "State=RESUME")

    slurm.command("scancel", "--signal=TERM", "--batch", number)  # what preemption sends
    slurm.wait("the student to save", lambda: log(tmp_path, "student-0.log").count("saved") == 1, 20)
    slurm.start_now(number, 1)
    slurm.wait("attempt 1", lambda: (tmp_path / "started-1").exists(), 60)
    (tmp_path / "kill-now").touch()
    slurm.start_now(number, 2)
    slurm.wait("the end", lambda: slurm.job(number)["JobState"] in ENDED, 60)
    assert (slurm.job(number)["JobState"], slurm.job(number)["ExitCode"]) == ("COMPLETED", "0:0")
    for rank in range(2):
        for attempt in range(3):
            assert f"train attempt={attempt} rank={rank}/2 local={rank} node=n1 secret=44" in log(tmp_path, f"student-{rank}.log")
    assert not list((tmp_path / "out").glob("*.token"))


def test_an_error_of_the_program_is_final(slurm, tmp_path):
    (tmp_path / "program.sh").write_text("#!/bin/bash\necho no; exit 1\n")
    number = submit(slurm, tmp_path, slurm_script(SlurmJob(name="wrong", recipe="r.yaml", output_dir="out", student_nodes=1, student_ranks_per_node=1, program="bash program.sh")))
    slurm.wait("the end", lambda: slurm.job(number)["JobState"] in ENDED, 40)
    assert (slurm.job(number)["JobState"], slurm.job(number)["ExitCode"]) == ("FAILED", "1:0")


def history(folder: Path) -> list[int]:
    """Training steps that the run wrote down."""
    path = folder / "twin/out/history.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row["step"] for row in rows if row.get("kind") == "step"]


def test_a_streamed_recipe_that_is_killed_resumes_and_ends(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    twin = shrink(ROOT / "recipes/qwen35_35b_9b_streamed.yaml", tmp_path / "twin")
    overrides = ["train.iters=24", "train.save_interval=4", "train.eval_iters=0", "teacher.layout.ep=1", "teacher.layout.etp=1"]
    script = tmp_path / "job.sbatch"
    monkeypatch.chdir(tmp_path)
    assert main(["launch", str(twin.path), *overrides, "--slurm", "--output", str(script), "--time", "00:20:00", "--program", f"{sys.executable} -m megatron_kd"]) == 0
    number = slurm.sbatch(script, ROOT)
    checkpoints, logs = tmp_path / "twin/out/checkpoints", tmp_path / "twin/out/logs/slurm"
    slurm.wait("the first checkpoint", lambda: (checkpoints / "iter_0000004/.metadata").exists(), 150)
    slurm.command("scancel", "--signal=KILL", (logs / "student.step").read_text().strip())
    slurm.start_now(number, 1)
    assert len(history(tmp_path)) < 24, "the kill came too late to prove anything"
    slurm.wait("the end", lambda: slurm.job(number)["JobState"] in ENDED, 150)
    output = (tmp_path / "twin/out" / f"slurm-{number}.out").read_text()
    assert slurm.job(number)["JobState"] == "COMPLETED", output[-3000:]
    assert sorted(set(history(tmp_path))) == list(range(24))
    said = "".join(path.read_text() for path in logs.glob("student-*.log"))
    assert "resuming after step" in said, said[-2000:]


def test_nemo_run_submits_student_and_teacher_as_two_jobs_that_meet(slurm, tmp_path):
    recipe, output = str(ROOT / "recipes/qwen35_35b_9b_streamed.yaml"), tmp_path / "out/shrink/qwen35_35b_9b_streamed/out"
    done = launch(tmp_path, recipe, "--slurm", "--shrink", "--gpus", "2", "--student-host", "n1", "--token", secrets.token_hex(16), "--time", "00:10:00", "--job-dir",
                  str(tmp_path / "jobs"), "train.iters=2", "train.save=false", "stream.bind=127.0.0.1", f"stream.rendezvous=127.0.0.1:{free_port()}",
                  environment=slurm.environment)
    assert done.returncode == 0, done.stderr[-3000:]
    slurm.wait("the end of training", lambda: (output / "summary.json").exists(), 150)
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["steps"], summary["placement"], summary["layout"]) == (2, "streamed", "tp=2 dp=1 sp")
    assert summary["stream_bytes"] == summary["stream_bytes_expected"] > 0
    slurm.wait("the student's job to end", lambda: len(slurm.command("squeue", "-h").splitlines()) == 1, 30)
    slurm.command("scancel", "--user", "root")  # teachers serve on
    slurm.wait("an empty queue", lambda: not slurm.command("squeue", "-h").strip(), 30)


def test_the_committed_scripts_are_what_the_command_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for name, recipe, options in (("single_allocation", "qwen35_35b_9b_streamed", ["--student-gpus", "16"]), ("heterogeneous", "qwen35_35b_9b_streamed", ["--student-gpus", "16", "--heterogeneous"]),
                                  ("cached_one_node", "qwen35_35b_9b_cached", ["--student-gpus", "8"])):
        assert main(["launch", f"recipes/{recipe}.yaml", "--slurm", "--output", "written", *options]) == 0
        assert Path("written").read_text() == (ROOT / f"recipes/slurm/{name}.sbatch").read_text(), f"recipes/slurm/{name}.sbatch is stale"


@pytest.mark.parametrize("script", sorted([*(ROOT / "recipes/slurm").glob("*.sbatch"), *(ROOT / "recipes/torchrun").glob("*.sh")]), ids=lambda p: p.name)
def test_shell_scripts_parse(script):
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
