"""The end of a run: a table for a person, summary.json for a program, curve.png for a slide.

Called by `train` on the reporting rank. Reads the history; measures nothing.
"""

import json
from pathlib import Path

from rich.table import Table

from megatron_kd.cli.history import History
from megatron_kd.cli.loss_memory import LossMemory
from megatron_kd.config.schema import Recipe

KD_METRIC, CE_METRIC = "kd loss", "ce loss"


def summary(recipe: Recipe, history: History, *, layout: str, wall_s: float, memory: LossMemory | None, extra: dict | None = None) -> dict:
    """What summary.json holds. Held-out values are None where the recipe evaluates nothing; loss bytes where they were not measured."""
    first, last = _ends(history)
    result = {
        "name": recipe.name,
        "placement": recipe.teacher.placement,
        "targets": f"top-{recipe.cache.k}" if recipe.teacher.placement == "cached" and recipe.cache.payload == "topk" else "hidden states",
        "layout": layout,
        "device": recipe.device,
        "steps": len(history.steps),
        "tokens": sum(r["tokens"] for r in history.steps.values()),
        "tokens_per_s": history.tokens_per_s(),
        "wall_s": wall_s,
        "divergence": recipe.loss.divergence,
        "temperature": recipe.loss.temperature,
    }
    kd = "heldout_kl" if recipe.loss.divergence == "forward_kl" and recipe.loss.temperature == 1.0 else "heldout_kd"
    for name, metric in ((kd, KD_METRIC), ("heldout_ce", CE_METRIC)):
        result[f"{name}_before"], result[f"{name}_after"] = first.get(metric), last.get(metric)
    result["loss_peak_bytes"] = memory.fused_peak_bytes if memory else None
    result["dense_loss_peak_bytes"] = memory.dense_peak_bytes if memory else None
    result["loss_relative_difference"] = memory.relative_difference if memory else None
    return result | {"step_s": _mean([r["seconds"] for r in history.steps.values()])} | source_numbers(recipe, history) | (extra or {})


def source_numbers(recipe: Recipe, history: History) -> dict:
    """What the target source counted on the reporting rank, {} where it counts nothing that a reader needs."""
    records = list(history.steps.values())
    if recipe.teacher.placement == "streamed" and any("stream/bytes" in r for r in records):
        steps = [r for r in records if "stream/bytes" in r]
        wait_s = sum(r["stream/wait_s"] for r in steps)
        return {
            "stream_wait_share": wait_s / sum(r["seconds"] for r in records),
            "stream_occupancy": _mean([r["stream/occupancy"] for r in steps]),
            "stream_bytes": steps[-1]["stream/bytes"],
            "stream_rows": steps[-1]["stream/rows_received"],
        }
    if recipe.teacher.placement == "cached" and any("cache/bytes" in r for r in records):
        rows = sum(r["cache/rows"] for r in records if "cache/rows" in r)
        return {
            "cache_rows": rows,
            "cache_missing_rows": sum(r["cache/missing_rows"] for r in records if "cache/rows" in r),
            "cache_teacher_mass_kept": _mean([r["cache/teacher_mass_kept"] for r in records if "cache/rows" in r]),
        }
    return {}


def stream_bytes_expected(recipe: Recipe, *, dp: int, teacher_width: int) -> int:
    """Closed form of `stream_bytes` after the last step of an unbroken run in which every row counts: the first evaluation and all steps."""
    from megatron_kd.stream.sizes import wire_payload_bytes

    sequences = (recipe.train.iters + recipe.train.eval_iters) * recipe.train.global_batch // dp
    layout = recipe.student.layout
    return wire_payload_bytes(sequences * recipe.data.seq_length, teacher_width, wire_dtype=recipe.stream.rows) // (layout.tp * layout.cp)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def table(result: dict) -> Table:
    """The same for a person."""
    view = Table(title=f"{result['name']}: {result['steps']} steps, teacher {result['placement']}, {result['layout']}", show_header=True)
    for column in ("", "before", "after", "change"):
        view.add_column(column, justify="left" if not column else "right")
    for label, name in (
        ("held-out KL(teacher || student)", "heldout_kl"),
        ("held-out divergence", "heldout_kd"),
        ("held-out cross-entropy", "heldout_ce"),
    ):
        before, after = result.get(f"{name}_before"), result.get(f"{name}_after")
        if before is not None and after is not None:
            view.add_row(label, f"{before:.3f}", f"{after:.3f}", f"{100 * (after - before) / before:+.1f}%")
    view.add_section()
    if result["tokens_per_s"]:
        view.add_row("training speed", "", f"{result['tokens_per_s']:,.0f} tokens/s", "")
    if result["loss_peak_bytes"]:
        dense, fused = result["dense_loss_peak_bytes"], result["loss_peak_bytes"]
        view.add_row(
            "peak memory of the loss (dense, fused)",
            _size(dense),
            _size(fused),
            f"{100 * (fused - dense) / dense:+.1f}%",
        )
    view.add_row("wall time", "", f"{result['wall_s']:,.0f} s", "")
    return view


def _size(num_bytes: int) -> str:
    """MiB, or KiB where that would be a small number of them."""
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes >= 10 * 2**20 else f"{num_bytes / 2**10:,.0f} KiB"


def write(folder: Path, result: dict, history: History) -> list[Path]:
    """summary.json and curve.png in `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    summary_path = folder / "summary.json"
    summary_path.write_text(json.dumps(result, indent=2) + "\n")
    return [summary_path, _curve(folder / "curve.png", result, history)]


def _ends(history: History) -> tuple[dict, dict]:
    evaluations = [history.evaluations[step] for step in sorted(history.evaluations)]
    return (evaluations[0] if evaluations and evaluations[0]["step"] == 0 else {}), (evaluations[-1] if evaluations else {})


def _curve(path: Path, result: dict, history: History) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    panels = ((KD_METRIC, "divergence from the teacher", "tab:blue"), (CE_METRIC, "cross-entropy", "tab:orange"))
    figure, both = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, (metric, label, colour) in zip(both, panels, strict=True):
        steps = [(s + 1, r[metric]) for s, r in sorted(history.steps.items()) if metric in r]
        held_out = [(s, r[metric]) for s, r in sorted(history.evaluations.items()) if metric in r]
        if steps:
            axes.plot(*zip(*steps), color=colour, alpha=0.6, label="training")
        if held_out:
            axes.plot(*zip(*held_out), "o--" if len(held_out) > 2 else "o", color=colour, label="held out")
        axes.set(xlabel="training steps", ylabel="nats per token", title=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
    both[0].set_ylim(bottom=0)
    figure.suptitle(f"{result['name']}  ({result['placement']}, {result['layout']})")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
