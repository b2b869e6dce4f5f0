"""`megatron-kd plan` as a user runs it: without torch, quickly, from names, configs and recipes; what it emits loads."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_kd.cli.main import main
from megatron_kd.config.load import load
from megatron_kd.plan.balance import Rates
from megatron_kd.plan.gpus import gpu
from megatron_kd.plan.job import Job
from megatron_kd.plan.memory import fits
from megatron_kd.plan.models import load_model
from megatron_kd.plan.recipe import job_from_recipe
from megatron_kd.plan.search import Limits, search
from megatron_kd.layout import ParallelLayout
from tests.unit.test_plan_models import LLAMA

ROOT = Path(__file__).parents[2]
PAIR = ["--teacher", "qwen3.5-35b-a3b", "--student", "qwen3.5-9b", "--gpus", "16"]
BLOCKED = """
import sys
for name in ("torch", "transformers", "megatron", "numpy"):
    sys.modules[name] = None
from megatron_kd.cli.main import main
code = main(sys.argv[1:])
sys.exit(code)
"""


def plan(capsys, *args: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one plan."""
    code = main(["plan", *args])
    out = capsys.readouterr()
    return code, out.out, out.err


def as_json(capsys, *args: str) -> dict:
    """The plan's JSON."""
    code, out, err = plan(capsys, *args, "--json")
    assert code == 0, err
    return json.loads(out)


def test_plan_works_with_torch_blocked_and_answers_in_seconds(tmp_path):
    started = time.monotonic()
    result = subprocess.run([sys.executable, "-c", BLOCKED, "plan", *PAIR, "--seq", "8192", "--emit", str(tmp_path / "r.yaml"), "--search"],
                            cwd=ROOT, capture_output=True, text=True,
                            timeout=60)
    assert result.returncode == 0, result.stderr
    assert "tightest GPU" in result.stdout and "left out" in result.stdout
    assert load(tmp_path / "r.yaml").data.seq_length == 8192
    assert time.monotonic() - started < 10  # about one on an idle core; others share these


def test_json_holds_every_part_of_the_plan(capsys):
    content = as_json(capsys, *PAIR, "--price", "2.5")
    assert content["models"]["teacher"]["parameters"] == 34_660_610_688
    assert [entry["job"]["placement"] for entry in content["placements"]] == ["colocated", "streamed", "cached"]
    for entry in content["placements"]:
        assert entry["cost_per_billion_tokens"] == pytest.approx(2.5 * entry["speed"]["gpu_hours_per_billion"])
        for stage in entry["stages"]:
            assert stage["total_bytes"] == sum(item["bytes"] for item in stage["items"])
            assert stage["fits"] == (stage["headroom_bytes"] >= 0)
            assert {item["group"] for item in stage["items"]} >= {"outside", "activations"}
    assert content["placements"][1]["traffic"]["targets"]["hidden_bytes"] == content["placements"][1]["job"]["global_batch"] * 4096 * 4096
    assert len(content["frontier"]) >= 8 and content["recommendation"].count(".") >= 1


def test_config_file_is_planned_like_a_name(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    content = as_json(capsys, "--teacher", str(tmp_path), "--student", str(tmp_path / "config.json"), "--gpus", "2", "--seq", "256",
                      "--global-batch", "8")
    assert content["models"]["teacher"]["parameters"] == content["models"]["student"]["parameters"]


def test_every_placement_shows_what_full_logits_would_need(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    args = ["recipes/llama_8b_3b_8k_online.yaml", "--gpu", "h200-141"]
    fused, modelopt, plain = (as_json(capsys, *args, *loss)["placements"][0] for loss in ((), ("--loss", "modelopt"), ("--loss", "dense")))
    assert fused["full_logits_instead"]["total_bytes"] == max(stage["total_bytes"] for stage in modelopt["stages"])
    names = {item["name"]: item["bytes"] for item in modelopt["stages"][0]["items"]}
    assert names["loss: teacher logits fp32"] == 8192 * 128_256 * 4 and names["head gradient scratch fp32"] == 0
    peaks = [entry["stages"][0]["allocated_bytes"] for entry in (fused, plain, modelopt)]
    assert peaks[2] - peaks[1] == 8 * 8192 * 128_256 and peaks[1] - peaks[0] > 20 * 2**30
    _, out, _ = plan(capsys, *args, "--brief")
    assert "needed with full logits, GiB" in out and f"{fused['full_logits_instead']['total_bytes'] / 2**30:.1f}" in out


def test_nothing_fits_is_said_with_the_reason_and_an_exit_code(capsys):
    code, out, _ = plan(capsys, "--teacher", "qwen3.5-397b-a17b", "--student", "qwen3.5-27b", "--gpus", "4", "--placement", "colocated", "--search",
                        "--brief")
    assert code == 3
    assert "Nothing fits" in out and "needs" in out and "over memory" in out


@pytest.mark.parametrize("args, message", [
    (["--teacher", "nobody/nothing", "--student", "qwen3.5-9b", "--gpus", "8"], "must be a Hugging Face config.json"),
    (["--teacher", "qwen3.5-9b", "--student", "llama-3.2-3b", "--gpus", "8"], "must share one tokenizer"),
    ([*PAIR, "--gpu", "h100-81"], "must be one of a100-40"),
    (["--teacher", "qwen3.5-9b"], "a plan needs a recipe"),
    ([*PAIR, "--seq", "0"], "must be at least 1"),
    ([*PAIR, "--measured", "/nowhere.json"], "cannot be read as JSON"),
    (["recipes/demo_smollm2.yaml", "--teacher", "qwen3.5-9b"], "a recipe names its models"),
    (["recipes/llama_8b_3b_8k_online.yaml", "--gpus", "3"], "must divide by micro_batch x dp = 3"),
    (["recipes/llama_8b_3b_8k_online.yaml", "--seq", "4096"], "Add data.seq_length=4096"),
    ([*PAIR, "--row-share", "1.5"], "must be above 0 and at most 1"),
])
def test_bad_request_is_refused_with_the_rule_and_no_traceback(capsys, monkeypatch, args, message):
    monkeypatch.chdir(ROOT)
    code, _, err = plan(capsys, *args)
    assert code == 1 and message in err and "Traceback" not in err


def test_pinned_values_are_kept(capsys):
    content = as_json(capsys, *PAIR, "--tp", "4", "--pp", "2", "--micro-batch", "2", "--recompute", "full", "--placement", "colocated")
    job = content["placements"][0]["job"]
    assert (job["layout"], job["micro_batch"], job["recompute"]) == ("tp=4 pp=2 dp=2 sp", 2, "full")


@pytest.mark.parametrize("placement", ["colocated", "streamed", "cached"])
def test_emitted_recipe_is_the_planned_job(capsys, tmp_path, placement):
    path = tmp_path / "recipe.yaml"
    code, _, err = plan(capsys, *PAIR, "--placement", placement, "--seq", "8192", "--emit", str(path))
    assert code == 0, err
    content = as_json(capsys, str(path), "--gpus", "16", "--placement", placement)
    fresh = as_json(capsys, *PAIR, "--placement", placement, "--seq", "8192")
    assert content["placements"][0]["stages"] == fresh["placements"][0]["stages"]


def test_every_shipped_recipe_can_be_planned(capsys):
    paths = sorted((ROOT / "recipes").glob("*.yaml"))
    assert paths
    for path in paths:
        recipe = load(path)
        job = job_from_recipe(recipe, gpu("h200-141"), None)
        assert job.seq == recipe.data.seq_length


def test_picture_shows_bars_and_frontier(capsys, tmp_path):
    code, _, _ = plan(capsys, *PAIR, "--plot", str(tmp_path / "plan.png"), "--brief")
    assert code == 0
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and (tmp_path / "plan.png").stat().st_size > 20_000


def template(teacher: str, student: str, **changes) -> Job:
    """A job for searches."""
    values = dict(student=load_model(student), teacher=load_model(teacher), placement="colocated", gpu=gpu("h100-80"), layout=ParallelLayout(),
                  seq=4096, global_batch=64) | changes
    return Job(**values)


def test_search_returns_only_jobs_that_fit_fastest_first_on_all_gpus():
    for placement in ("colocated", "streamed", "cached"):
        found = search(template("gpt-oss-120b", "gpt-oss-20b"), placement, 32, Rates(), keep=5)
        assert found.best and all(fits(candidate.job) for candidate in found.best)
        assert all(candidate.job.num_gpus == 32 for candidate in found.best)
        hours = [candidate.speed.gpu_hours_per_billion for candidate in found.best]
        assert hours == sorted(hours)


def test_search_says_why_nothing_fits():
    found = search(template("qwen3.5-397b-a17b", "qwen3.5-27b"), "colocated", 8, Rates())
    assert not found.best and "GiB at best" in found.why_none and found.nearest.headroom < 0
    none = search(template("qwen3.5-397b-a17b", "qwen3.5-27b"), "streamed", 8, Rates())
    assert "no teacher replica fits" in none.why_none


def test_search_widens_context_parallelism_only_when_asked():
    long = template("llama-3.1-8b", "llama-3.1-8b", seq=131072)
    assert all(candidate.job.layout.cp == 1 for candidate in search(long, "cached", 8, Rates()).best)
    assert any(candidate.job.layout.cp > 1 for candidate in search(long, "cached", 8, Rates(), limits=Limits(max_cp=4), keep=20).best)
