"""The demo's own command, shortened: real weights, real text, three ranks over gloo."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Output folder and printed text of three steps, and one step of the colocated leg."""
    out = tmp_path_factory.mktemp("demo")
    environment = os.environ | {
        "MEGATRON_KD_CACHE": str(ROOT / "out" / "models"),
        "DEMO_OUT": str(out),
        "DEMO_ARGS": f"train.iters=3 train.warmup_iters=2 train.eval_iters=1 data.cache_dir={out}/data",
        "DEMO_LEGS": "colocated",
        "DEMO_LEG_STEPS": "1",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run([ROOT / "tools" / "demo.sh"], env=environment, capture_output=True, text=True, timeout=280)
    logs = "\n".join(f"--- {p.name}\n" + "\n".join(p.read_text().splitlines()[-25:]) for p in sorted(out.rglob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return out, done.stdout + done.stderr


def test_demo_lowers_held_out_divergence_and_writes_its_summary(demo):
    out, _ = demo
    result = json.loads((out / "summary.json").read_text())
    assert result["heldout_kl_after"] < 0.8 * result["heldout_kl_before"] and result["heldout_ce_after"] < 0.8 * result["heldout_ce_before"]
    assert 8 < result["heldout_kl_before"] < 10, "the pruned student starts where it was seen to start"
    assert result["tokens_per_s"] > 0 and result["wall_s"] > 0 and result["layout"].startswith("tp=3") and result["placement"] == "streamed"
    assert 0 < result["loss_peak_bytes"] < result["dense_loss_peak_bytes"] and result["loss_relative_difference"] < 1e-5


def test_demo_shows_progress_with_time_left_and_a_table(demo):
    out, printed = demo
    assert "left" in printed and "kd loss" in printed and "held-out KL(teacher || student)" in printed
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_streamed_and_colocated_teacher_give_the_same_losses(demo):
    out, _ = demo
    streamed, colocated = json.loads((out / "compare.json").read_text())
    assert (streamed["placement"], colocated["placement"], colocated["shared_steps"]) == ("streamed", "colocated", 1)
    assert colocated["max_kd_difference"] < 1e-4 and colocated["max_ce_difference"] < 1e-4, "the teacher's layouts differ, so fp32 rounding does"
    assert streamed["stream_bytes"] == streamed["stream_bytes_expected"] > 0
