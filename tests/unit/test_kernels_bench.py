"""`megatron-kd bench loss`: a small run on the CPU, its JSON, and its refusal to time a loss that is wrong."""

import argparse
import json

import pytest
import torch

from megatron_kd.cli import bench
from megatron_kd.cli.bench_measure import Shape, least_flops, make_case
from megatron_kd.errors import ConfigError


def arguments(*extra):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(["loss", "--device", "cpu", "--shape", "tiny", "--tokens", "96", "--budget-s", "0.01", *extra])


def test_all_own_methods_pass_the_gate_and_land_in_the_json(tmp_path, capsys):
    path = tmp_path / "loss.json"
    assert bench.run(arguments("--divergence", "forward_kl", "reverse_kl", "jsd", "--json", str(path))) == 0
    report = json.loads(path.read_text())
    methods = {row["method"] for row in report["rows"]}
    assert {"ours forward_kl", "ours reverse_kl", "ours jsd", "ours top-k", "ours evaluation", "dense", "forward-chunked", "checkpointed",
            "published top-k"} <= methods
    for row in report["rows"]:
        assert row["ms"] > 0 and row["error"] < 1e-5
        target = {"ours top-k": "top_k", "ours evaluation": "evaluation"}.get(row["method"], "top_k" if "top-k" in row["method"] else "online")
        flops = least_flops(Shape(vocab=1000, student_width=48, teacher_width=64), 96, target)
        assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9)
    assert {"device", "versions", "commit", "date", "command", "gemm_tflops"} <= report.keys()
    assert "ours forward_kl" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["gradient doubled", "loss biased"])
def test_a_wrong_loss_is_not_timed_and_exits_with_1(monkeypatch, capsys, fault):
    right = bench.fused_linear_kd

    def wrong(student_NH, head_VH, *args, **kwargs):
        if fault == "gradient doubled":
            return right(2.0 * student_NH - student_NH.detach(), head_VH, *args, **kwargs)
        return right(1.001 * student_NH, head_VH, *args, **kwargs)

    monkeypatch.setattr(bench, "fused_linear_kd", wrong)
    with pytest.raises(SystemExit) as stop:
        bench.run(arguments("--methods", "ours forward_kl"))
    assert stop.value.code == 1
    out = capsys.readouterr().out
    assert "fails the gate" in out and "TFLOP/s" not in out


def test_least_flops_are_those_of_the_products():
    shape = Shape(vocab=128_256, student_width=3072, teacher_width=4096)
    assert least_flops(shape, 1, "online") == 2 * 128_256 * (4096 + 3 * 3072)
    assert least_flops(shape, 2, "top_k") == 4 * 128_256 * 3 * 3072
    assert least_flops(shape, 1, "evaluation") == 2 * 128_256 * (4096 + 3072)


def test_kept_tokens_of_a_case_are_distinct_and_their_mass_and_tail_add_to_one():
    case = make_case(Shape(vocab=300, student_width=8, teacher_width=8), 70, top_k=20, device=torch.device("cpu"), dtype=torch.float32)
    assert all(len(set(ids.tolist())) == 20 for ids in case.ids_NK)
    torch.testing.assert_close(case.log_probs_NK.exp().sum(1) + case.tail_N, torch.ones(70))


def test_an_unknown_shape_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="llama-8b-3b.*V,Hs,Ht"):
        bench.parse_shape("llama")
    assert bench.parse_shape("10,4,8")[1] == Shape(vocab=10, student_width=4, teacher_width=8)
