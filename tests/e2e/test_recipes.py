"""Every recipe loads, is explained and fits its stated hardware by the planner; one of each kind really trains, saves, resumes and exports."""

import json
import re

import pytest

from megatron_kd.config.load import load
from megatron_kd.convert.shrink import kept_degrees
from tests.harness import RankPool
from tests.recipe_runs import prove
from tools.run_recipes import GPUS_LINE, RECORD, planned, recipes

NAMES = [path.stem for path in recipes()]
PATHS = {path.stem: path for path in recipes()}
WANTED = {
    "gpt_oss_120b_20b_streamed", "gpt_oss_20b_compressed_32k_cached", "gpt_oss_120b_60b_healing_streamed", "gpt_oss_20b_smoke", "qwen35_35b_9b_colocated",
    "qwen35_35b_9b_streamed", "qwen35_35b_9b_cached", "qwen35_122b_27b_streamed", "qwen35_397b_35b_streamed", "qwen35_35b_4b_one_node", "qwen35_27b_9b_colocated",
    "qwen35_35b_9b_lora", "llama_8b_3b_8k_cached", "llama_8b_3b_8k_online",
}


@pytest.fixture(scope="module")
def teacher_ranks():
    """A second world beside `megatron_ranks`, for streamed teachers."""
    pool = RankPool("megatron")
    yield pool
    pool.close()


def test_every_promised_recipe_is_there():
    assert set(NAMES) == WANTED


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_for_whom_it_is_and_fits_its_hardware(name):
    text, recipe = PATHS[name].read_text(), load(PATHS[name])
    assert recipe.name == name and re.search(r"^# For: ", text, re.M)
    plan = planned(PATHS[name])
    assert plan["fits"], plan
    stated_gib = float(re.search(r"^# Memory: ([\d.]+) GiB", text, re.M)[1])
    assert stated_gib == pytest.approx(plan["peak_gib"], rel=0.05), "the header's figure is stale: run tools/run_recipes.py --plan-only"
    assert int(GPUS_LINE.search(text)[1]) == plan["gpus"]


def test_the_committed_record_holds_a_proof_of_every_recipe():
    record = json.loads(RECORD.read_text())["recipes"]
    assert set(record) == set(NAMES)
    for name, row in record.items():
        proof = row["proof"]
        assert row["plan"]["fits"] and len(proof["losses"]) == 3 and proof["resumed_after_step"] == 2 and proof["exported_tensors"] > 0, name
        assert proof["max_logit_error"] < 1e-4, name


@pytest.mark.parametrize("name", ["qwen35_35b_9b_colocated", "qwen35_397b_35b_streamed", "gpt_oss_20b_compressed_32k_cached", "gpt_oss_20b_smoke"])
def test_a_recipes_small_twin_trains_saves_resumes_and_exports(name, megatron_ranks, teacher_ranks, tmp_path):
    proof = prove(PATHS[name], tmp_path / name, megatron_ranks, teacher_ranks)
    assert proof.max_logit_error < 1e-4 and proof.losses[0] != proof.losses[2]


@pytest.mark.parametrize(("degrees", "ranks", "layout", "used", "dropped"), [
    (dict(tp=8, pp=4, cp=1, ep=1, vpp=None, dp=4), 4, dict(tp=2, pp=2, sequence_parallel=True), 4, ["tp=8 -> 2", "pp=4 -> 2", "data parallelism"]),
    (dict(tp=2, pp=1, cp=2, ep=8, vpp=None, dp=2), 4, dict(tp=2, ep=2, etp=1, sequence_parallel=True), 4, ["cp=2", "ep=8 -> 2"]),
    (dict(tp=1, pp=1, cp=1, ep=8, vpp=None, dp=1), 2, dict(ep=2, etp=1), 2, ["ep=8 -> 2"]),
    (dict(tp=1, pp=2, cp=1, ep=8, vpp=2, dp=1), 2, dict(pp=2), 2, ["vpp=2", "data parallelism", "ep=8"]),
    (dict(tp=1, pp=1, cp=1, ep=1, vpp=None, dp=1), 4, {}, 1, []),
])
def test_degrees_are_kept_in_kind_and_each_drop_is_named(degrees, ranks, layout, used, dropped):
    notes = []
    assert kept_degrees(degrees, ranks, "student", notes, has_experts=degrees["ep"] > 1) == (layout, used)
    assert len(notes) == len(dropped) and all(d in n for d, n in zip(sorted(dropped), sorted(n.removeprefix("student ") for n in notes))), notes
