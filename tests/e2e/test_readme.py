"""README's commands, run as they are written, and what it claims checked against the repository."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ELSEWHERE = {"make demo": "tests/e2e/test_demo.py"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ELSEWHERE])
def test_command_runs_as_written(command):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-ec", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_that_run_elsewhere_are_run_there():
    for command, test in ELSEWHERE.items():
        assert command in COMMANDS and "tools" in (ROOT / test).read_text() and (ROOT / "tools" / "demo.sh").exists()
    assert "@tools/demo.sh" in (ROOT / "Makefile").read_text()


def test_first_command_is_within_the_first_screen():
    assert README.split("\n").index("make demo") < 12


@pytest.mark.parametrize("code", blocks("python"))
def test_python_example_runs(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_layer_picture_is_the_one_that_is_enforced():
    from tests.unit.test_layering import LAYERS

    picture = re.search(r"^```\n(cli\n.*?)^```", README, re.MULTILINE | re.DOTALL)[1]
    assert [set(line.split()) for line in picture.splitlines()][::-1] == [set(layer) for layer in LAYERS]


def test_quoted_speeds_are_those_of_the_committed_runs():
    rows = json.loads((ROOT / "docs/benchmarks/loss_h200.json").read_text())["rows"]
    names = {
        "this package": "ours forward_kl",
        "dense logits": "dense",
        "chunks recomputed in backward": "checkpointed",
        "this package, cached top-100": "ours top-k",
        "the published scheme, top-100 (our writing of it)": "published top-k",
    }
    for label, method in names.items():
        cells = [cell.strip() for cell in re.search(rf"^\| {re.escape(label)} \|(.*)\|$", README, re.MULTILINE)[1].split("|")]
        for shape, (ms, gib) in (("llama-8b-3b", cells[:2]), ("qwen3.5-35b-9b", cells[2:])):
            row = next(r for r in rows if (r["method"], r["shape"], r["tokens"]) == (method, shape, 32768))
            expected = ("out of memory", "") if row["ms"] is None else (f"{row['ms']:.0f} ms", f"{row['peak_gib']:.1f} GiB")
            assert (ms, gib) == expected, (label, shape)


def test_quoted_demo_is_the_committed_run():
    run = json.loads((ROOT / "docs/benchmarks/demo_cpu.json").read_text())
    summary, text = run["summary"], " ".join(README.split())
    assert (
        f"In {summary['steps']} steps ({summary['tokens']:,} tokens) the held-out KL falls from {summary['heldout_kl_before']:.2f} to {summary['heldout_kl_after']:.2f}"
        in text
    )
    fused, dense = round(summary["loss_peak_bytes"] / 2**20), round(summary["dense_loss_peak_bytes"] / 2**20)
    assert f"the loss holds {fused} MiB where dense logits hold {dense}" in text
    colocated = next(row for row in run["compare"] if row["placement"] == "colocated")
    assert colocated["max_kd_difference"] == colocated["max_ce_difference"] == 0.0, "README says: the same losses"
