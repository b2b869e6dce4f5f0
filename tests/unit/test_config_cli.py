"""The program: dispatch, errors as exit codes, logs, history and report."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_kd.cli import logs
from megatron_kd.cli.allocations import TrackedAllocations
from megatron_kd.cli.history import History
from megatron_kd.cli.loss_memory import measure
from megatron_kd.cli.main import COMMANDS, _parse, main
from megatron_kd.cli.report import summary, table, write
from megatron_kd.config.load import build
from megatron_kd.vocab import VocabSpec

RECIPE = {"name": "x", "output_dir": "out/x", "device": "cpu", "student": {"model": "s"}, "teacher": {"model": "t"}, "train": {"iters": 3}}


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize(("command", "takes_recipe"), [("train", True), ("launch", True), ("selfcheck", False)])
def test_help_names_the_options_that_go_with_any_recipe(capsys, command, takes_recipe):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert ("--shrink" in capsys.readouterr().out) is takes_recipe


def test_unknown_command_is_a_usage_error_that_lists_the_known_ones(capsys):
    assert main(["trian"]) == 2
    assert "'trian'" in (text := capsys.readouterr().err) and "train" in text


def test_package_error_becomes_one_line_and_exit_code_1(capsys):
    assert main(["train", "nowhere.yaml"]) == 1
    assert capsys.readouterr().err.startswith("ConfigError: recipe = 'nowhere.yaml'")


def test_layout_that_needs_more_ranks_is_refused_before_anything_is_built(tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(RECIPE))
    assert main(["train", str(path), "student.layout.tp=3"]) == 1
    assert "world_size = 1" in (text := capsys.readouterr().err) and "3" in text


@pytest.mark.parametrize(("key", "package"), [("wandb_project", "wandb"), ("mlflow_experiment", "mlflow")])
def test_a_logging_service_that_is_not_installed_is_named_before_the_models_are_built(tmp_path, capsys, monkeypatch, key, package):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, find=importlib.util.find_spec: None if name == package else find(name))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(RECIPE))
    assert main(["train", str(path), f"train.{key}=p"]) == 1
    assert capsys.readouterr().err == f"MissingDependency: train.{key} = 'p': needs the package {package}: pip install {package}\n"


def test_a_slurm_script_goes_into_a_new_folder_and_without_slurm_is_not_submitted(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "r.yaml").write_text(json.dumps(RECIPE))
    assert main(["launch", "r.yaml", "--slurm", "--output", "jobs/new/job.sbatch"]) == 0
    assert (tmp_path / "jobs/new/job.sbatch").read_text().startswith("#!/bin/bash")
    assert main(["launch", "r.yaml", "--slurm", "--submit"]) == 1
    assert "--output" in capsys.readouterr().err


def test_a_slurm_script_says_what_the_planner_expects_and_is_not_written_for_what_does_not_fit(capsys, monkeypatch, tmp_path):
    recipe = str(Path(__file__).parents[2] / "recipes/qwen35_35b_9b_streamed.yaml")
    monkeypatch.chdir(tmp_path)
    launch = ["launch", recipe, "--slurm", "--student-gpus", "16", "--gpu"]
    assert main([*launch, "h100-80"]) == 0
    assert re.search(r"^# memory: \d+\.\d GiB on the fullest of 20 GPUs by the planner, \d+\.\d GiB of h100-80 left$", capsys.readouterr().out, re.M)
    assert main([*launch, "a100-40"]) == 1
    assert "GiB more than there is" in (said := capsys.readouterr()).err and "#SBATCH" not in said.out


def test_dispatcher_imports_no_torch():
    code = "import sys; sys.modules['torch'] = None; from megatron_kd.cli.main import main; sys.exit(main(['--version']))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_redirected_output_lands_in_the_file_and_the_terminal_stays_reachable(tmp_path):
    path = tmp_path / "a" / "rank0.log"
    code = (
        "import os, sys; from pathlib import Path; from megatron_kd.cli import logs\n"
        "with logs.to_file(Path(sys.argv[1])) as terminal:\n"
        "    print('from python'); os.write(2, b'from C\\n'); terminal.write('for a person\\n')\n"
        "print('after')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("after\n", "for a person\n")
    assert path.read_text() == "from python\nfrom C\n"


def test_history_of_a_resumed_run_drops_steps_that_will_be_repeated(tmp_path):
    first = History.open(tmp_path / "h.jsonl", 0)
    first.add_evaluation(0, {"kd loss": 9.0})
    for step in range(4):
        first.add_step(step, seconds=2.0, tokens=100, metrics={"kd loss": 8.0 - step})
    resumed = History.open(tmp_path / "h.jsonl", 2)
    assert list(resumed.steps) == [0, 1] and list(resumed.evaluations) == [0]
    resumed.add_step(2, seconds=2.0, tokens=100, metrics={"kd loss": 5.5})
    again = History.open(tmp_path / "h.jsonl", 3)
    assert [r["kd loss"] for r in again.steps.values()] == [8.0, 7.0, 5.5] and again.tokens_per_s() == 50.0


def test_summary_table_and_curve_state_held_out_change(tmp_path):
    history = History.open(tmp_path / "h.jsonl", 0)
    history.add_evaluation(0, {"kd loss": 8.0, "ce loss": 9.0})
    history.add_step(0, seconds=4.0, tokens=100, metrics={"kd loss": 7.0, "ce loss": 8.0})
    history.add_evaluation(1, {"kd loss": 6.0, "ce loss": 7.0})
    result = summary(build(RECIPE), history, layout="tp=1 dp=1", wall_s=12.0, memory=None)
    assert (result["heldout_kl_before"], result["heldout_kl_after"], result["heldout_ce_before"], result["heldout_ce_after"]) == (8.0, 6.0, 9.0, 7.0)
    assert (result["tokens_per_s"], result["placement"], result["layout"], result["wall_s"]) == (25.0, "colocated", "tp=1 dp=1", 12.0)
    assert "heldout_kl_before" not in summary(build(RECIPE, ["loss.temperature=2"]), history, layout="", wall_s=1.0, memory=None), (
        "at T=2 the divergence is no KL of the models"
    )
    cells = [cell for column in table(result | {"dense_loss_peak_bytes": 400 * 2**20, "loss_peak_bytes": 3 * 2**10}).columns for cell in column.cells]
    assert {"-25.0%", "400 MiB", "3 KiB"} <= set(cells)
    paths = write(tmp_path / "out", result, history)
    assert json.loads(paths[0].read_text()) == result and paths[1].read_bytes().startswith(b"\x89PNG")


def test_tracked_allocations_count_what_lives_at_once():
    with TrackedAllocations() as seen:
        a = torch.zeros(1000)
        b = a.view(10, 100) + 1  # the view is free, the sum is not
        del a
        c = torch.zeros(500)
        c.add_(1)
    assert (seen.peak_bytes, seen.live_bytes, seen.largest_bytes) == (8000, 6000, 4000)
    del b, c


def test_measured_memory_compares_two_losses_that_agree():
    vocab = VocabSpec(true_size=4000, student_padded=4096, teacher_padded=4000)
    memory = measure(
        num_rows=512, student_width=32, teacher_width=32, vocab=vocab, dtype=torch.float32, kd_weight=0.9, ce_weight=0.1, window_rows=32, group=None
    )
    assert memory.relative_difference < 1e-5
    assert memory.dense_peak_bytes >= 2 * 512 * 4000 * 4, "dense holds both models' logits"
    assert memory.fused_peak_bytes < memory.dense_peak_bytes / 8


@pytest.mark.parametrize("wrong", ["labels", "direction"])
def test_measured_memory_would_notice_losses_that_differ(monkeypatch, wrong):
    import megatron_kd.cli.loss_memory as module

    dense = module.dense_kd
    if wrong == "labels":
        monkeypatch.setattr(module, "dense_kd", lambda s, h, t, g, labels, **k: dense(s, h, t, g, (labels + 1) % 4000, **k))
    else:
        monkeypatch.setattr(module, "dense_kd", lambda s, h, t, g, labels, **k: dense(t.requires_grad_(), g.requires_grad_(), s, h, labels, **k))
    vocab = VocabSpec(true_size=4000, student_padded=4096, teacher_padded=4000)
    memory = measure(
        num_rows=64, student_width=32, teacher_width=32, vocab=vocab, dtype=torch.float32, kd_weight=0.9, ce_weight=0.1, window_rows=32, group=None
    )
    assert memory.relative_difference > 1e-4


def finished_run(folder, placement, losses, **numbers):
    recipe = build(RECIPE, [f"teacher.placement={placement}", *(["stream.rows=fp32"] if placement == "streamed" else [])])
    history = History.open(folder / "history.jsonl", 0)
    for step, loss in enumerate(losses):
        history.add_step(step, seconds=2.0, tokens=100, metrics={"kd loss": loss, "ce loss": 2 * loss} | numbers)
    write(folder, summary(recipe, history, layout="tp=1 dp=1", wall_s=1.0, memory=None), history)
    return folder


def test_compared_runs_show_their_largest_difference_over_shared_steps_and_their_source(tmp_path, capsys):
    streamed = finished_run(
        tmp_path / "s",
        "streamed",
        [3.0, 2.0, 1.0],
        **{"stream/bytes": 1e6, "stream/wait_s": 0.5, "stream/occupancy": 0.75, "stream/rows_received": 10},
    )
    colocated = finished_run(tmp_path / "c", "colocated", [3.0, 2.25])
    assert main(["compare", str(streamed), str(colocated), "--json", str(tmp_path / "compare.json")]) == 0
    rows = json.loads((tmp_path / "compare.json").read_text())
    assert (rows[0]["max_kd_difference"], rows[1]["max_kd_difference"], rows[1]["max_ce_difference"], rows[1]["shared_steps"]) == (None, 0.25, 0.5, 2)
    assert (rows[0]["stream_wait_share"], rows[0]["stream_occupancy"], rows[0]["stream_bytes"]) == (0.25, 0.75, 1e6)
    printed = " ".join(capsys.readouterr().out.split())
    assert "waited 25% of the step" in printed and "colocated" in printed


def test_compare_names_a_folder_without_a_run(tmp_path, capsys):
    assert main(["compare", str(tmp_path)]) == 1
    assert str(tmp_path) in (text := capsys.readouterr().err) and "summary.json" in text


def test_bytes_of_the_stream_follow_from_the_recipe():
    from megatron_kd.cli.report import stream_bytes_expected

    recipe = build(
        RECIPE,
        [
            "train.iters=26",
            "train.eval_iters=3",
            "train.global_batch=2",
            "train.micro_batch=2",
            "data.seq_length=384",
            "student.layout.tp=3",
            "stream.rows=fp32",
        ],
    )
    assert stream_bytes_expected(recipe, dp=1, teacher_width=576) == 29 * 768 // 3 * 576 * 4


def test_overrides_may_follow_an_option_and_nothing_else_may(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("target"), parser.add_argument("--recipe"), parser.add_argument("overrides", nargs="*")
    assert _parse(parser, ["t", "a=1", "--recipe", "r", "b=2"]).overrides == ["a=1", "b=2"]
    with pytest.raises(SystemExit):
        _parse(parser, ["t", "--recipe", "r", "stray"])
    with pytest.raises(SystemExit):
        _parse(parser, ["t", "--no-such=1"])


@pytest.mark.parametrize(("layout", "queues"), [({}, None), ({"tp": 2}, "1"), ({"cp": 2}, "1")])
@pytest.mark.parametrize("named", [None, "0"])
def test_environment_of_gpu_processes_is_set_unless_it_names_a_value(monkeypatch, layout, queues, named):
    from megatron_kd.cli.train import start_runtime

    names = ("TRITON_CACHE_AUTOTUNING", "CUDA_DEVICE_MAX_CONNECTIONS")
    for name in names:
        monkeypatch.setenv(name, named or "")  # known to monkeypatch, which takes back what follows
        if named is None:
            monkeypatch.delenv(name)
    start_runtime(build(RECIPE | {"device": "cuda", "student": {"model": "s", "layout": layout}}))
    assert [os.environ.get(name) for name in names] == ([named, named] if named else ["1", queues])
