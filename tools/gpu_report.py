"""Join the JSON files of measured runs (tools/run_many.py, folder OUT) into the files that docs/benchmarks.md and docs/planner.md quote.

    python tools/gpu_report.py OUT docs/benchmarks

What OUT does not hold stays in the files as it was, so that a later machine can fill in what an earlier one left open.
single_gpu.json: the published comparisons; plan_measured.json: measured peaks beside the committed predictions; two_gpus.json: small models
under every layout, the stream and placements compared; quality.json and quality.png: held-out curves. TFLOP/s counts the least work: student forward and
backward without recompute, teacher forward, loss 2 V (H_t + 3 H_s) or 2 V 3 H_s a row (megatron_kd/plan/flops.py).
"""

import dataclasses
import json
import sys
from pathlib import Path

from megatron_kd.plan import flops, predict

LABELS = {"ours": "fused", "dense": "dense", "forward-chunked": "forward-chunked", "checkpointed": "checkpointed chunks", "published": "published scheme", "dense-rows": "dense"}
RECIPE_OF = {"llama_online": "dense_3b_colocated_full_recompute", "llama_cached": "dense_3b_cached", "gpt_oss_6_32k": "gpt_oss_6_layers_32k_cached",
             "gpt_oss_2_32k": "gpt_oss_2_layers_32k_cached", "gpt_oss_2_16k": "gpt_oss_2_layers_16k_cached"}


def read(folder: Path) -> dict[str, dict]:
    """Measurements by run name; of several ranks the one with the highest peak."""
    found: dict[str, dict] = {}
    for path in sorted(folder.glob("*.json*")):
        name, result = path.name.split(".json")[0], json.loads(path.read_text())
        if isinstance(result, dict) and (name not in found or max(result.get("peak_bytes", [0])) > max(found[name].get("peak_bytes", [0]))):
            found[name] = result
    return found


def job_of(lists: list[dict], name: str, result: dict):
    """The planner's job of a measured run, without recompute: what must be computed."""
    content, run = next((c, r) for c in lists for r in c["runs"] if r["name"] == name)
    return dataclasses.replace(predict.run_job(run, content)[1], recompute="none", placement=result["placement"])


def timed(name: str, result: dict, job) -> dict:
    """A row of the comparison: all steps but the first, their least, rate and peak."""
    row = {"run": name, "loss": LABELS[result["loss"]], "placement": result["placement"], "seq_length": result["seq_length"], "global_batch": result["global_batch"],
           "recompute": result["recompute"], "command": result["command"], "date": result["date"]}
    if "error" in result:
        return row | {"error": result["error"]}
    steps = result["step_s"][1:]
    work = (flops.student_flops(job) + flops.loss_flops(job) + (flops.teacher_flops(job) if job.placement == "colocated" else 0.0)) * result["seq_length"] * result["global_batch"]
    return row | {"step_s": steps, "least_step_s": min(steps), "tflops": work / min(steps) / 1e12, "peak_gib": max(result["peak_bytes"][1:]) / 2**30,
                  "kd_loss": result["losses"][-1]["kd loss"]}


def planned(results: dict, predictions: list[dict], lists: list[dict]) -> list[dict]:
    """Predicted and measured peaks."""
    by_name = {RECIPE_OF[n.rsplit("_", 1)[0]]: r for n, r in results.items() if n.endswith("_ours") and n.rsplit("_", 1)[0] in RECIPE_OF and "cached_ours" not in n}
    by_name |= {n: r for n, r in results.items() if any(n == run["name"] for c in lists for run in c["runs"])}
    rows = []
    for entry in predictions:
        measured = by_name.get(entry["name"])
        peak = max(measured["peak_bytes"][1:]) if measured and "error" not in measured else None
        rows.append({"run": entry["name"], "held_out": entry["held_out"], "layout": entry["job"]["layout"], "placement": entry["job"]["placement"],
                     "recompute": entry["job"]["recompute"], "predicted_gib": entry["max_memory_allocated"] / 2**30, "measured_gib": peak and peak / 2**30,
                     "error_percent": peak and 100 * (entry["max_memory_allocated"] / peak - 1), "command": measured and measured["command"], "date": measured and measured["date"]})
    return rows


def quality(results: dict, out: Path, environment: dict) -> None:
    """Held-out curves, as numbers and as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = {"online_dense": "dense, online", "online_ours": "fused, online", "streamed": "fused, streamed", "cached_tail": "cached top-100, tail bucket",
             "cached_renormalised": "cached top-100, renormalised", "ce_only": "cross-entropy only"}
    rows, (figure, axes) = [], plt.subplots(1, 2, figsize=(11, 4.2))
    for (name, label), style in zip(names.items(), ("k-", "C0--", "C1:", "C2-", "C3-", "C4-")):
        result = results[f"quality_{name}"]
        points = result["evaluations"][:-1]  # the last is a second set of held-out batches, after training
        rows.append({"run": label, "evaluations": result["evaluations"], "first_training_losses": result["losses"][:5], "command": result["command"], "date": result["date"]})
        for axis, metric in zip(axes, ("kd loss", "ce loss")):
            axis.plot([p["step"] for p in points], [p[metric] for p in points], style, label=label, marker="." if "-" in style else None)
    for axis, title in zip(axes, ("held-out KL(teacher || student)", "held-out cross-entropy")):
        axis.set(xlabel="training step (65,536 tokens each)", title=title, yscale="log")
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "quality.png", dpi=110)
    write(out / "quality.json", {**environment, "runs": rows})


def write(path: Path, content: dict) -> None:
    """Pretty JSON."""
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)


def main() -> None:
    """All files."""
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    results = read(folder)
    lists = [json.loads((out / name).read_text()) for name in ("plan_runs.json", "published_runs.json")]
    predictions = [entry for name in ("plan_predictions.json", "published_predictions.json") for entry in json.loads((out / name).read_text())["runs"]]
    environment = {"device": "NVIDIA H200, two of one host", "versions": {"torch": "2.11.0+cu130", "transformer_engine": "2.20.2", "megatron_core": "0.19.2",
                   "megatron_bridge": "0.6.2", "transformers": "5.12.1", "flash_linear_attention": "0.6.0", "tilelang": "0.1.15"}, "list": "docs/benchmarks/runs_h200.json"}
    rows = [timed(n, r, job_of(lists, RECIPE_OF[n.split("_ours")[0].split("_dense")[0].split("_forward")[0].split("_checkpointed")[0].split("_published")[0]], r))
            for n, r in results.items() if n.startswith(("llama_", "gpt_oss_"))]
    update(out / "single_gpu.json", environment, rows=rows)
    update(out / "plan_measured.json", environment, rows=[row for row in planned(results, predictions, lists) if row["measured_gib"]])
    smokes = {n: r for n, r in results.items() if n.startswith("smoke_")}
    streams = {n: {k: r[k] for k in ("step_s", "peak_bytes", "metrics", "losses", "command", "date")} for n, r in results.items()
               if "streamed" in n and r.get("step_s") and not n.startswith(("quality", "smoke"))}
    references = {n.removeprefix("cpu_"): {k: r[k] for k in ("losses", "command", "date")} for n, r in results.items() if n.startswith("cpu_")}
    update(out / "two_gpus.json", environment, small_models=smokes, small_models_cpu=references, teachers={n: r for n, r in results.items() if n.startswith("teacher_")}, streamed=streams, placements=[placement(n, r, results) for n, r in results.items() if n.startswith("qwen35_")
           and not n.endswith(".teacher")],
           loss_tp2=lines(folder / "tp2_bench.log", ("TFLOP/s", "efficiency")), selfcheck_tp2=lines(folder / "tp2_bench.log", ("checks on",)),
           kernel_tests=lines(folder / "t_kernels.log", ("passed", "failed")), stream_tests=lines(folder / "t_stream.log", ("GB/s", "TFLOP/s", "passed", "failed")))
    if any(name.startswith("quality_") for name in results):
        quality(results, out, environment)
    for row in rows:
        print(row["run"], row["loss"], row.get("error") or f"{row['least_step_s']:.3f} s {row['tflops']:.0f} TFLOP/s {row['peak_gib']:.2f} GiB")


def placement(name: str, result: dict, results: dict) -> dict:
    """One run of a pair: time, tokens, peaks of both sides, losses."""
    teacher = results.get(f"{name}.teacher")
    row = {"run": name, "layout": result["layout"], "placement": result["placement"], "recompute": result["recompute"], "global_batch": result["global_batch"],
           "micro_batch": result["micro_batch"], "command": result["command"], "date": result["date"], "teacher_peak_gib": teacher and max(teacher["peak_bytes"]) / 2**30}
    if "error" in result:
        return row | {"error": result["error"]}
    least = min(result["step_s"][1:])
    return row | {"step_s": result["step_s"], "least_step_s": least, "tokens_per_s_per_gpu": result["seq_length"] * result["global_batch"] / least / 2,
                  "peak_gib": max(result["peak_bytes"][1:]) / 2**30, "losses": result["losses"], "metrics": result["metrics"]}


def update(path: Path, environment: dict, **parts) -> None:
    """`path` with new rows in the place of those of the same run, and other parts where they are not empty."""
    content = json.loads(path.read_text()) if path.is_file() else dict(environment)
    for key, new in parts.items():
        if new and isinstance(new, dict):
            content[key] = content.get(key, {}) | new
        elif new and isinstance(new[0], dict):
            names = {row["run"]: row for row in new}
            old = content.get(key, [])
            content[key] = [names.pop(row["run"], row) for row in old] + list(names.values())
        elif new:
            content[key] = new
    write(path, content)


def lines(log: Path, words: tuple[str, ...]) -> list[str]:
    """Lines of a log that hold a word."""
    return [line.strip() for line in log.read_text().splitlines() if any(w in line for w in words)] if log.is_file() else []


if __name__ == "__main__":
    main()
