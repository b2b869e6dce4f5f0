"""What `megatron-kd plan --emit` writes is a recipe that runs: its small twin trains, saves, resumes and exports, for each placement."""

import pytest

from megatron_kd.cli.main import main
from tests.harness import RankPool
from tests.recipe_runs import prove


@pytest.fixture(scope="module")
def teacher_ranks():
    """A second world beside `megatron_ranks`, for streamed teachers."""
    pool = RankPool("megatron")
    yield pool
    pool.close()


@pytest.mark.parametrize("placement", ["colocated", "streamed", "cached"])
def test_an_emitted_recipe_runs(placement, megatron_ranks, teacher_ranks, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    assert main(["plan", "--teacher", "llama-3.1-8b", "--student", "llama-3.2-3b", "--gpus", "8", "--gpu", "h100-80", "--seq", "8192", "--tp", "2", "--placement", placement,
                 "--emit", str(path), "--brief"]) == 0
    capsys.readouterr()
    proof = prove(path, tmp_path / placement, megatron_ranks, teacher_ranks)
    assert proof.student_layout.startswith("tp=2") and proof.max_logit_error < 1e-4 and proof.losses[0] != proof.losses[2]
