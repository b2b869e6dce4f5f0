"""The plan as a picture: memory bars per stage for each placement, and the frontier over sequence length and teacher size.

matplotlib is imported at the first use. Called by the command line.
"""

from pathlib import Path

from megatron_kd.plan.report import GIB, Plan

GROUPS = {"weights": "student weights", "gradients": "gradients", "optimizer": "optimizer state", "activations": "activations", "loss": "loss",
          "targets": "teacher rows, ring",
          "teacher": "teacher", "outside": "context, slack"}
COLOURS = ("#4878a8", "#7aa6c2", "#a9c9d8", "#e3a857", "#d1603d", "#8f6fb0", "#5d8a4e", "#bbbbbb")


def draw(plan: Plan, path: str | Path) -> Path:
    """Write the picture to `path` (PNG, SVG or PDF by its ending)."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    bars, lines = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_bars(plan, bars)
    _draw_frontier(plan, lines)
    if plan.placements:
        job = plan.placements[0].job
        figure.suptitle(f"{job.teacher.name} -> {job.student.name}, {job.gpu.name}, sequence {job.seq:,}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw_bars(plan: Plan, axes) -> None:
    stages = [(entry.job.placement, stage) for entry in plan.placements for stage in entry.stages]
    base = [0.0] * len(stages)
    for (group, label), colour in zip(GROUPS.items(), COLOURS, strict=True):
        heights = [stage.group_bytes(group) / GIB for _, stage in stages]
        axes.bar(range(len(stages)), heights, bottom=base, color=colour, label=label, width=0.7)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    if stages:
        axes.axhline(stages[0][1].capacity / GIB, color="black", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(stages)), [f"{placement}\n{stage.role} {stage.stage}" for placement, stage in stages], fontsize=7)
    axes.set_ylabel("GiB of one GPU (dashed: its memory)")
    axes.legend(fontsize=7, ncols=2)


def _draw_frontier(plan: Plan, axes) -> None:
    if not plan.frontier:
        axes.set_axis_off()
        return
    for name, colour in (("colocated", "#d1603d"), ("streamed", "#4878a8")):
        axes.plot([point.seq for point in plan.frontier], [getattr(point, name) / 1e9 for point in plan.frontier], marker="o", color=colour,
                  label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("sequence length, tokens")
    axes.set_ylabel("largest teacher that fits, billions of parameters")
    axes.legend()
    axes.grid(alpha=0.3)
