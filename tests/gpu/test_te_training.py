"""Small models through the command line on a GPU with Transformer Engine: trained, saved, resumed bit for bit, exported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformer_engine")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOOL = Path(__file__).parents[2] / "tools" / "gpu_smoke.py"


def smoke(family: str, tmp_path: Path, *arguments: str) -> dict:
    """The tool's JSON."""
    target = tmp_path / "result.json"
    subprocess.run([sys.executable, str(TOOL), family, "--out", str(tmp_path), "--json", str(target), *arguments], check=False, timeout=900)
    return json.loads(target.read_text())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llama", "gpt-oss", "qwen3.5", "qwen3.5-moe"])
def test_small_model_trains_saves_resumes_and_exports(family, tmp_path):
    result = smoke(family, tmp_path)
    assert set(result["exit"].values()) == {0}, result
    assert result["resumed_difference"] == 0.0
    steps = [result["losses"][str(step)]["kd loss"] for step in range(4)]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", ["tp=2,ep=2,etp=1", "pp=2", ""])
def test_two_gpus_train_as_one_does(layout, tmp_path):
    overlap = ["--set", "train.overlap_grad_reduce=true", "train.overlap_param_gather=true"] if not layout else []
    one = smoke("gpt-oss", tmp_path, "--steps-only", "--name", "one")
    two = smoke("gpt-oss", tmp_path, "--steps-only", "--name", "two", "--world", "2", "--layout", layout, *overlap)
    for step, losses in one["losses"].items():
        assert two["losses"][step] == pytest.approx(losses, rel=0.01)
