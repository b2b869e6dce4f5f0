"""Predictions of a list of runs, made before they are measured, and the recipes to run them with.

A list (docs/benchmarks/plan_runs.json) names models by a known name and changed config fields, recipe keys, and a `loss` where it is not the fused one. `predict` writes what the
planner says of each run; `write_runs` writes each run's recipe and model configs, from which the runs are made. Called by the command line.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatron_kd.config.load import build
from megatron_kd.config.schema import Recipe
from megatron_kd.errors import PlanError, rule
from megatron_kd.loss.sizes import call_bytes, head_gradient_bytes
from megatron_kd.plan.gpus import gpu
from megatron_kd.plan.job import Job
from megatron_kd.plan.memory import all_stages, dense_loss_bytes, loss_shape, shard_columns
from megatron_kd.plan.models import KNOWN_DIR, from_config
from megatron_kd.plan.recipe import job_of
from megatron_kd.plan.report import job_dict, stage_dict


def read_runs(path: str | Path) -> dict[str, Any]:
    """The list. Errors: PlanError."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise PlanError(rule("--predict-runs", str(path), f"cannot be read as JSON: {e}", "Pass a list like docs/benchmarks/plan_runs.json")) from e
    if not content.get("runs"):
        raise PlanError(rule("--predict-runs", str(path), "holds no runs", "Pass a list like docs/benchmarks/plan_runs.json"))
    return content


def model_config(reference: list) -> dict[str, Any]:
    """The Hugging Face config of [known name, changed fields]; multi-token prediction is left out."""
    name, changes = reference
    config = json.loads((KNOWN_DIR / f"{name}.json").read_text(encoding="utf-8"))
    return {**config, **({"mtp_num_hidden_layers": 0} if "mtp_num_hidden_layers" in config else {}), **changes}


def run_recipe(run: dict[str, Any], defaults: dict[str, Any], folder: str) -> dict[str, Any]:
    """The recipe of one run as plain dicts; `folder` holds its model configs."""
    content: dict[str, Any] = {"name": run["name"], "output_dir": f"{folder}/out"}
    values = {**defaults, "student.model": f"{folder}/student", "student.init": "random", "teacher.model": f"{folder}/teacher", **run["set"]}
    for key, value in values.items():
        *parents, last = key.split(".")
        node = content
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return content


def run_job(run: dict[str, Any], content: dict[str, Any]) -> tuple[Recipe, Job]:
    """(recipe, job) of one run."""
    recipe = build(run_recipe(run, content["defaults"], f"out/plan_runs/{run['name']}"), source=run["name"])
    student, teacher = (from_config(model_config(run[side]), side) for side in ("student", "teacher"))
    return recipe, replace(job_of(recipe, student, teacher, gpu(content["gpu"]), run["gpus"]), loss=run.get("loss", "fused"))


def prediction(run: dict[str, Any], job: Job) -> dict[str, Any]:
    """What is held against the measurement of one run."""
    stages = all_stages(job)
    student = max((stage for stage in stages if stage.role == "student"), key=lambda stage: stage.allocated)
    columns = shard_columns(job)
    return {
        "name": run["name"], "held_out": bool(run.get("held_out")), "job": job_dict(job),
        "max_memory_allocated": student.allocated,
        "loss_call_bytes": call_bytes(loss_shape(job)), "head_gradient_bytes": head_gradient_bytes(columns, job.student.hidden),
        "ring_bytes": sum(item.bytes for item in student.items if item.name.startswith("ring of")),
        "dense_kd_loss_bytes": dense_loss_bytes(job),
        "stages": [stage_dict(stage) for stage in stages],
    }


def predict(runs: str | Path, out: str | Path) -> list[dict[str, Any]]:
    """Write the predictions of all runs to `out` and return them."""
    content = read_runs(runs)
    results = [prediction(run, run_job(run, content)[1]) for run in content["runs"]]
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps({"gpu": content["gpu"], "runs": results}, indent=1) + "\n", encoding="utf-8")
    return results


def table(results: list[dict[str, Any]]) -> str:
    """The predictions as a Markdown table, GiB; measured values go beside them."""
    lines = ["| run | layout, recompute | peak allocated, GiB | of it loss call | head gradient scratch | ring | dense KD loss instead |",
             "|---|---|---|---|---|---|---|"]
    for entry in results:
        sizes = [entry[key] / 2**30 for key in ("max_memory_allocated", "loss_call_bytes", "head_gradient_bytes", "ring_bytes",
                                                "dense_kd_loss_bytes")]
        cells = [entry["name"], f"{entry['job']['layout']}, {entry['job']['recompute']}", *(f"{size:.2f}" for size in sizes)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_runs(runs: str | Path, folder: str | Path) -> list[Path]:
    """Write `folder`/NAME/recipe.yaml and the two models' config.json for every run; returns the recipes' paths. Weights are random: a colocated or
    streamed teacher needs a checkpoint of its config beside it."""
    content = read_runs(runs)
    paths = []
    for run in content["runs"]:
        home = Path(folder) / run["name"]
        for side in ("student", "teacher"):
            (home / side).mkdir(parents=True, exist_ok=True)
            (home / side / "config.json").write_text(json.dumps(model_config(run[side]), indent=1) + "\n", encoding="utf-8")
        recipe = run_recipe(run, content["defaults"], str(home))
        build(recipe, source=run["name"])
        (home / "recipe.yaml").write_text(f"# {run['gpus']} GPUs in all\n" + yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
        paths.append(home / "recipe.yaml")
    return paths
