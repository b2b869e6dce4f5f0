"""What a plan says: one dataclass tree, as rich tables and as JSON.

Called by the command line and by docs. No torch. Sizes are GiB (2^30) in tables and bytes in JSON.
"""

import dataclasses
import io
from dataclasses import dataclass
from typing import Any

from megatron_kd.plan.balance import Speed, teacher_share
from megatron_kd.plan.frontier import FrontierPoint
from megatron_kd.plan.job import Job
from megatron_kd.plan.memory import StageMemory
from megatron_kd.plan.params import params_by_group, total_params
from megatron_kd.plan.traffic import Flow, TargetTraffic, student_flows, target_traffic, teacher_flows

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """One placement of a plan."""

    job: Job
    stages: tuple[StageMemory, ...]
    """Student stages, then those of a streamed replica."""
    speed: Speed
    largest_seq: int | None
    """Longest sequence that fits; None: none."""
    largest_teacher: int
    """Parameters of the largest teacher that fits here."""
    full_logits: StageMemory
    """The tightest GPU if the loss were over full logits as in ModelOpt (top-K rows: Megatron-LM), everything else equal."""

    @property
    def tightest(self) -> StageMemory:
        """The stage with the least headroom."""
        return min(self.stages, key=lambda stage: stage.headroom)

    @property
    def fits(self) -> bool:
        """Whether every GPU can hold its stage."""
        return self.tightest.fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All placements of one request."""

    placements: tuple[PlacementPlan, ...]
    frontier: tuple[FrontierPoint, ...]
    recommendation: str
    price: float | None
    """Currency units per GPU-hour; None: not asked."""
    assumptions: tuple[str, ...]
    """What was assumed, for the reader to replace."""
    refused: dict[str, str]
    """Placements that cannot be built, with the rule."""


def as_dict(plan: Plan) -> dict[str, Any]:
    """JSON-ready values."""
    first = plan.placements[0].job if plan.placements else None
    return {
        "models": {role: {"name": model.name, "parameters": total_params(model), "by_component": params_by_group(model)}
                   for role, model in (("student", first.student), ("teacher", first.teacher))} if first else {},
        "placements": [_placement_dict(entry, plan.price) for entry in plan.placements],
        "refused": plan.refused,
        "frontier": [dataclasses.asdict(point) for point in plan.frontier],
        "recommendation": plan.recommendation,
        "assumptions": list(plan.assumptions),
    }


def stage_dict(stage: StageMemory) -> dict[str, Any]:
    """One stage's memory, JSON-ready."""
    return {"role": stage.role, "stage": stage.stage, "fits": stage.fits, "moment": stage.moment, "allocated_bytes": stage.allocated,
            "total_bytes": stage.total,
            "capacity_bytes": stage.capacity, "headroom_bytes": stage.headroom, "items": [dataclasses.asdict(item) for item in stage.items]}


def job_dict(job: Job) -> dict[str, Any]:
    """A job's settings, JSON-ready, models and GPU by name."""
    out = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    out |= {"student": job.student.name, "teacher": job.teacher.name, "gpu": job.gpu.name, "layout": job.layout.describe(),
            "teacher_layout": job.teacher_shard.describe() if job.placement == "streamed" else None, "num_gpus": job.num_gpus}
    return out


def _placement_dict(entry: PlacementPlan, price: float | None) -> dict[str, Any]:
    r, f = teacher_share(entry.job)
    return {
        "job": job_dict(entry.job), "fits": entry.fits, "stages": [stage_dict(stage) for stage in entry.stages],
        "largest_seq": entry.largest_seq, "largest_teacher_parameters": entry.largest_teacher,
        "full_logits_instead": {"fits": entry.full_logits.fits, "allocated_bytes": entry.full_logits.allocated, "total_bytes": entry.full_logits.total},
        "traffic": {"student_rank": [dataclasses.asdict(flow) for flow in student_flows(entry.job)],
                    "teacher_rank": [dataclasses.asdict(flow) for flow in teacher_flows(entry.job)],
                    "targets": dataclasses.asdict(target_traffic(entry.job))},
        "speed": dataclasses.asdict(entry.speed), "teacher_share_of_gpus": r, "teacher_share_of_flops": f,
        "cost_per_billion_tokens": None if price is None else price * entry.speed.gpu_hours_per_billion,
    }


def render(plan: Plan, *, width: int | None = None, detail: bool = True) -> str:
    """The plan as text tables."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width or 150, highlight=False)
    for name, why in plan.refused.items():
        console.print(f"[bold]{name}[/]: cannot be built. {why}", markup=True)
    if plan.placements:
        console.print(_summary_table(plan))
        if detail:
            for entry in plan.placements:
                console.print(_memory_table(entry))
            for entry in plan.placements:
                console.print(_traffic_table(entry))
        if plan.frontier:
            console.print(_frontier_table(plan))
    console.print(f"[bold]{plan.recommendation}[/]")
    for line in plan.assumptions:
        console.print(f"  assumed: {line}", style="dim")
    return console.file.getvalue()


def _table(title: str, *columns: str):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _summary_table(plan: Plan):
    job = plan.placements[0].job
    title = (f"{job.teacher.name} -> {job.student.name}: {job.num_gpus} x {job.gpu.name}, sequence {job.seq:,}, global batch {job.global_batch}")
    rows = [("fits", lambda e: "yes" if e.fits else "NO"), ("tightest GPU", lambda e: f"{e.tightest.role} stage {e.tightest.stage}"),
            ("needed / there, GiB", lambda e: f"{e.tightest.total / GIB:.1f} / {e.tightest.capacity / GIB:.1f}"),
            ("headroom, GiB", lambda e: f"{e.tightest.headroom / GIB:.1f}"),
            ("needed with full logits, GiB", lambda e: f"{e.full_logits.total / GIB:.1f}" + ("" if e.full_logits.fits else " (does not fit)")),
            ("student layout", lambda e: e.job.layout.describe()), ("micro-batch, recompute", lambda e: f"{e.job.micro_batch}, {e.job.recompute}"),
            ("teacher", lambda e: _teacher_text(e.job)), ("longest sequence", lambda e: f"{e.largest_seq:,}" if e.largest_seq else "-"),
            ("largest teacher like this", lambda e: f"{e.largest_teacher / 1e9:.0f} B" if e.job.placement != "cached" else "-"),
            ("step, s (student / teacher)", lambda e: f"{e.speed.step_s:.2f} ({e.speed.student_s:.2f} / {e.speed.teacher_s:.2f})"),
            ("tokens/s", lambda e: f"{e.speed.tokens_s:,.0f}"), ("GPU-hours per billion tokens", lambda e: f"{e.speed.gpu_hours_per_billion:,.0f}"),
            ("replicas, ring slots needed", lambda e: f"{e.speed.replicas_needed}, {e.speed.ring_depth_needed}" if e.speed.replicas_needed else "-"),
            ("network per student GPU, GB/s", lambda e: f"{e.speed.network_gb_s:.2f} of {e.job.gpu.network_bytes_s / 1e9:.0f}"),
            ("network limits", lambda e: e.speed.network_limit or "nothing")]
    if plan.price is not None:
        rows.insert(-3, ("cost per billion tokens", lambda e: f"{plan.price * e.speed.gpu_hours_per_billion:,.0f}"))
    table = _table(title, "", *(entry.job.placement for entry in plan.placements))
    for name, value in rows:
        table.add_row(name, *(value(entry) for entry in plan.placements))
    return table


def _teacher_text(job: Job) -> str:
    if job.placement == "colocated":
        return "on the same GPUs"
    if job.placement == "cached":
        return f"run once on {job.teacher_shard.world_size}: {job.payload}" + (f" K={job.top_k}" if job.payload == "topk" else "")
    return f"{job.teacher_replicas} x ({job.teacher_shard.describe()})"


def _memory_table(entry: PlacementPlan):
    names = list(dict.fromkeys(item.name for stage in entry.stages for item in stage.items if item.bytes))
    table = _table(f"memory of one GPU, {entry.job.placement}, GiB (* closed form of the allocation)", "",
                   *(f"{stage.role} {stage.stage}" for stage in entry.stages))
    for name in names:
        found = [next((item for item in stage.items if item.name == name and item.bytes), None) for stage in entry.stages]
        star = " *" if all(item is None or item.exact for item in found) else ""
        table.add_row(name + star, *(f"{item.bytes / GIB:.2f}" if item else "" for item in found))
    table.add_section()
    table.add_row("sum", *(f"{stage.total / GIB:.2f}" for stage in entry.stages))
    table.add_row("of which PyTorch allocates", *(f"{stage.allocated / GIB:.2f}" for stage in entry.stages))
    table.add_row("headroom", *(f"{stage.headroom / GIB:.2f}" for stage in entry.stages))
    table.add_row("worst moment", *(stage.moment for stage in entry.stages))
    return table


def _traffic_table(entry: PlacementPlan):
    table = _table(f"traffic a step, {entry.job.placement}, GB sent by one GPU", "", "NVLink", "network", "GB/s needed", "GB/s there")
    step = entry.speed.step_s

    def add(side: str, flow: Flow) -> None:
        over_network = flow.network_bytes > 0
        there = entry.job.gpu.network_bytes_s if over_network else entry.job.gpu.nvlink_bytes_s
        table.add_row(f"{side} {flow.name}", f"{flow.nvlink_bytes / 1e9:.3f}", f"{flow.network_bytes / 1e9:.3f}",
                      f"{(flow.network_bytes if over_network else flow.nvlink_bytes) / step / 1e9:.3f}", f"{there / 1e9:.0f}")

    for flow in student_flows(entry.job):
        add("student", flow)
    for flow in teacher_flows(entry.job):
        add("teacher", flow)
    targets: TargetTraffic = target_traffic(entry.job)
    if entry.job.placement == "streamed":
        table.add_section()
        for name, size in (("hidden states (what is sent)", targets.hidden_bytes), ("dense logits instead", targets.logits_bytes),
                           (f"top-{entry.job.top_k} instead (not exact)", targets.top_k_bytes), ("requests", targets.request_bytes)):
            table.add_row(f"whole run: {name}", "", f"{size / 1e9:.3f}", f"{size / step / 1e9:.3f}", "")
    return table


def _frontier_table(plan: Plan):
    table = _table("largest teacher of this shape, billions of parameters", "sequence", "colocated", "streamed, a replica on half of the GPUs")
    for point in plan.frontier:
        table.add_row(f"{point.seq:,}", f"{point.colocated / 1e9:.1f}", f"{point.streamed / 1e9:.1f}")
    return table
