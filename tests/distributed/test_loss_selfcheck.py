"""`megatron-kd selfcheck` passes as it is and fails, with exit code 1, on each fault that peers were found to have."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_kd.cli import selfcheck
from megatron_kd.errors import ConfigError
from megatron_kd.kernels import torch_twin
from megatron_kd.kernels.spec import SLOPE
from megatron_kd.loss import check, denominator, fused
from megatron_kd.loss import reduce as loss_reduce
from megatron_kd.loss.objective import Objective
from megatron_kd.vocab import VocabSpec


def arguments(**changes) -> argparse.Namespace:
    return argparse.Namespace(**(dict(json=None, device="cpu", backend="torch", tp=None) | changes))


def gradient_times_tp(patch):
    """Autograd through an all_reduce or all_gather of a loss that every rank computes."""
    original = fused._constant
    patch(fused, "_constant", lambda *a: original(*a) * dist.get_world_size())


def wrong_direction(patch):
    """A softmax whose normaliser autograd took for this shard's alone: the teacher's mass of the shard replaces 1. The loss stays right."""
    original = torch_twin.row_grad

    def row_grad(student_RV, teacher_RV, joined_RJ, weights_R, labels_R, spec):
        log_p, _ = torch_twin._log_probs(student_RV, teacher_RV, joined_RJ, spec)
        local = joined_RJ.clone()
        local[:, SLOPE] = -log_p.exp().sum(1)
        original(student_RV, teacher_RV, local, weights_R, labels_R, spec)

    patch(torch_twin, "row_grad", row_grad)


def padding_in_softmax(patch):
    """Padding columns take part on both sides."""
    original = Objective.pair_spec
    patch(Objective, "pair_spec", lambda self, num_true, student, teacher: original(self, 240 // dist.get_world_size(), student, teacher))


def shards_by_local_index(patch):
    """Each side is cut at its own padded size and shards are paired column by column."""
    patch(VocabSpec, "teacher_rows", lambda self, rank: (rank * (self.teacher_padded // self.tp), rank * (self.teacher_padded // self.tp) + self.num_true(rank)))


def mean_of_means(patch):
    """Each micro-batch divided by its own count."""
    patch(denominator, "row_factors", lambda shares: [share.factor / share.count.double() / len(shares) for share in shares])


def dx_not_reduced(patch):
    """Each rank keeps its shard's part of dX."""
    patch(loss_reduce.PlainRows, "send_dx", lambda self, window: None)


FAULTS = {fault.__name__: fault for fault in (gradient_times_tp, wrong_direction, padding_in_softmax, shards_by_local_index, mean_of_means, dx_not_reduced)}


def run_with(rank, world, name, path=None, tp=None):
    """Exit code of selfcheck with one fault in place."""
    patch = pytest.MonkeyPatch()
    try:
        if name is not None:
            FAULTS[name](patch.setattr)
        return selfcheck.run(arguments(json=path, tp=tp))
    finally:
        patch.undo()


def test_passes_on_two_ranks_and_writes_every_row(ranks, tmp_path):
    path = tmp_path / "rows.json"
    assert ranks.run(run_with, 2, timeout_s=120, name=None, path=path) == [0, 0]
    result = json.loads(path.read_text())
    assert result["passed"] and all(set(row) == {"check", "layout", "scale", "cosine", "max_error", "passed"} for row in result["rows"])
    layouts = {row["layout"] for row in result["rows"]}
    assert {"tp=2 float32", "tp=2 bfloat16", "tp=2 float64", "tp=2 sp even float32", "tp=2 sp even, teacher's rows too bfloat16"} <= layouts


@pytest.mark.parametrize("name", FAULTS)
def test_exits_1_on_the_fault(ranks, name):
    assert ranks.run(run_with, 2, timeout_s=120, name=name) == [1, 1]


@pytest.mark.parametrize("name, wrong, right", [
    ("wrong_direction", {"dx_NH", "dw_VH"}, {"loss_N", "kd_N", "ce_N"}),
    ("dx_not_reduced", {"dx_NH"}, {"loss_N", "kd_N", "ce_N", "dw_VH"}),
    ("mean_of_means", {"denominator"}, {"loss_N", "dx_NH", "dw_VH", "finite difference"}),
])
def test_the_table_names_what_is_wrong_and_only_that(ranks, tmp_path, name, wrong, right):
    path = tmp_path / "rows.json"
    ranks.run(run_with, 2, timeout_s=120, name=name, path=path)
    failed = {row["check"] for row in json.loads(path.read_text())["rows"] if not row["passed"]}
    assert all(any(part in text for text in failed) for part in wrong)
    assert not any(part in text for text in failed for part in right)


def test_started_by_torchrun_as_a_user_would(tmp_path):
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megatron_kd", "selfcheck", "--device", "cpu", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert f"{len(rows)} checks on cpu, 0 failed" in done.stdout and done.stdout.count("  ok\n") == len(rows) > 100, "one table, from one rank"
    assert {row["layout"].split()[0] for row in rows} == {"tp=2"}


def test_alone_and_with_bad_arguments(capsys):
    case = next(iter(selfcheck.cases()))
    assert isinstance(case, check.Case) and torch.float32 == case.dtype
    assert selfcheck.run(arguments()) == 0
    assert "0 failed" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--tp"):
        selfcheck.run(arguments(tp=2))
