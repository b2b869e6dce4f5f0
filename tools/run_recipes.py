#!/usr/bin/env python3
"""Prove every recipe twice: the planner says that it fits its stated hardware, and its small twin trains, saves, resumes and exports here.

    tools/run_recipes.py [NAME ...] [--plan-only]      (`make recipes` runs all; about six minutes on two cores)

Writes the record docs/benchmarks/recipes.json (rows of other recipes are kept), the table in docs/recipes.md, and the memory line in
each recipe's header.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_kd.config.load import load  # noqa: E402
from megatron_kd.plan.gpus import gpu  # noqa: E402
from megatron_kd.plan.memory import all_stages, worst  # noqa: E402
from megatron_kd.plan.recipe import job_from_recipe  # noqa: E402

RECORD = ROOT / "docs/benchmarks/recipes.json"
TABLE = ROOT / "docs/recipes.md"
GPUS_LINE = re.compile(r"^# GPUs: (\d+) x (\d+) GB", re.M)
GPU_OF = {80: "h100-80", 141: "h200-141"}
START, END = "<!-- recipes: written by tools/run_recipes.py -->", "<!-- end -->"


def recipes() -> list[Path]:
    """Every recipe but the demo, which `make demo` runs at full size."""
    return [p for p in sorted((ROOT / "recipes").glob("*.yaml")) if not p.stem.startswith("demo")]


def planned(path: Path) -> dict:
    """The planner's verdict on the hardware that the header states."""
    count, size = map(int, GPUS_LINE.search(path.read_text()).groups())
    job = job_from_recipe(load(path), gpu(GPU_OF[size]), count)
    tight = worst(job)
    return {"gpus": count, "gpu_gb": size, "gpu": job.gpu.name, "fits": bool(tight.fits), "peak_gib": round(max(s.total for s in all_stages(job)) / 2**30, 1),
            "headroom_gib": round(tight.headroom / 2**30, 1)}


def write_header(path: Path, plan: dict) -> None:
    """Put the planner's figure behind the GPUs line."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# Memory:")]
    at = next(i for i, line in enumerate(lines) if line.startswith("# GPUs:")) + 1
    while not lines[at - 1].rstrip().endswith("."):
        at += 1
    lines.insert(at, f"# Memory: {plan['peak_gib']} GiB on the fullest GPU by the planner ({plan['headroom_gib']} GiB of {plan['gpu']} left).")
    path.write_text("\n".join(lines) + "\n")


def table(rows: dict[str, dict]) -> str:
    """Markdown: which recipe was proven how."""
    lines = ["| recipe | pair | placement | planned on | peak GiB | proof run on the CPU | dropped in the proof run | logits after export |", "|---|---|---|---|---|---|---|---|"]
    for name, row in rows.items():
        plan, proof = row.get("plan", {}), row.get("proof")
        ran = f"{proof['processes']} processes: student {proof['student_layout']}" + (f"; teacher {proof['teacher_layout']}" if proof["teacher_layout"] else "") if proof else "not run"
        lines.append(f"| {name} | {row['pair']} | {row['placement']} | {plan['gpus']} x {plan['gpu']}{'' if plan['fits'] else ' (does not fit)'} | {plan['peak_gib']} | {ran} | "
                     f"{'; '.join(proof['dropped']) or 'nothing' if proof else ''} | {format(proof['max_logit_error'], '.1e') if proof else ''} |")
    return "\n".join(lines)


def write(record: dict) -> None:
    """The record and the table in docs, after every recipe."""
    known = {p.stem for p in recipes()}
    record["recipes"] = {name: row for name, row in sorted(record["recipes"].items()) if name in known}
    record["command"], record["machine"] = "make recipes", f"{platform.machine()}, CPU, gloo"
    record["versions"] = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core", "megatron-bridge", "transformers")}
    record["commit"] = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    if TABLE.exists():
        text = TABLE.read_text()
        TABLE.write_text(text[: text.index(START) + len(START)] + "\n" + table(record["recipes"]) + "\n" + text[text.index(END):])


def main() -> int:
    """Prove, record, and say which failed."""
    from tests.harness import RankPool
    from tests.recipe_runs import pair_kind, prove

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--folder", type=Path, default=ROOT / "out/recipes")
    args = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"recipes": {}}
    failed = []
    pools = [] if args.plan_only else [RankPool("megatron"), RankPool("megatron")]
    for path in recipes():
        recipe, row = load(path), record["recipes"].setdefault(path.stem, {})
        row |= {"pair": pair_kind(recipe), "placement": recipe.teacher.placement, "plan": planned(path)}
        write_header(path, row["plan"])
        failed += [f"{path.stem}: does not fit"] * (not row["plan"]["fits"])
    for path in recipes():
        row = record["recipes"][path.stem]
        if not args.plan_only and (not args.names or path.stem in args.names):
            try:
                proof = dataclasses.asdict(prove(path, args.folder / path.stem, *pools))
                row["proof"] = {key: value for key, value in proof.items() if key not in ("recipe", "placement", "pair")} | {"date": time.strftime("%Y-%m-%d")}
                print(f"{path.stem}: {proof['wall_s']} s, losses {[round(s['total loss'], 4) for s in proof['losses']]}, logits within {proof['max_logit_error']:.1e}", flush=True)
            except Exception as error:  # noqa: BLE001 -- the other recipes still run
                row.pop("proof", None)
                failed.append(f"{path.stem}: {str(error)[-2500:]}")
                print(f"{path.stem}: FAILED", flush=True)
        write(record)
    for pool in pools:
        pool.close()
    print("\n".join(failed) or "all proven")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
