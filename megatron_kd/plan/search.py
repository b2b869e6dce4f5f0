"""Search: the best layouts of a placement on a number of GPUs, and why the others fail.

Walks tp, pp, ep, cp (dp fills the rest), micro-batch and recompute of the student; for a streamed teacher its replica's layout and how many
replicas. Everything tried is a Job, so what Megatron refuses is refused here by the same checks. Called by the command line. No torch.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megatron_kd.errors import KDError
from megatron_kd.layout import ParallelLayout
from megatron_kd.plan.activations import Recompute
from megatron_kd.plan.balance import Rates, Speed, speed, streamed_over_colocated, teacher_share
from megatron_kd.plan.gpus import Gpu
from megatron_kd.plan.job import PLACEMENTS, Job, Placement
from megatron_kd.plan.memory import StageMemory, teacher_stage, worst
from megatron_kd.plan.models import ModelShape
from megatron_kd.plan.params import check_layout

RECOMPUTE = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8)
MAX_BUILD_GPUS = 256  # of one replica that builds a cache
LEAST_GAIN = 1.02  # below it two placements are equal, as far as assumed efficiencies can tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user pinned; None leaves a value to the search."""

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    cp: int | None = None
    micro_batch: int | None = None
    recompute: Recompute | None = None
    replicas: int | None = None
    max_cp: int = 1
    """Largest context-parallel degree tried where cp is not pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A job that fits, with its tightest GPU and its speed."""

    job: Job
    memory: StageMemory
    speed: Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of a search over one placement."""

    best: tuple[Candidate, ...]
    """Fastest first."""
    reasons: dict[str, int]
    """Why layouts were left out, with how many."""
    nearest: StageMemory | None
    """Where nothing fits: the tightest GPU of the layout that came nearest."""
    nearest_job: Job | None
    """That layout's job."""

    @property
    def why_none(self) -> str:
        """One sentence where nothing fits."""
        if self.nearest is None:
            return "no layout is allowed: " + "; ".join(self.reasons)
        big = max((item for item in self.nearest.items), key=lambda item: item.bytes)
        return (f"needs {self.nearest.total / 2**30:.1f} of {self.nearest.capacity / 2**30:.1f} GiB at best "
                f"({self.nearest.role} stage {self.nearest.stage}, {big.name} {big.bytes / 2**30:.1f} GiB)")


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`."""
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def layouts(model: ModelShape, num_gpus: int, gpu: Gpu, *, limits: Limits = Limits(), max_pp: int = 16) -> Iterator[ParallelLayout]:
    """Layouts of `num_gpus` that Megatron can build for `model`: tp within a node, etp 1, sequence parallelism with tp."""
    tps = [limits.tp] if limits.tp else [tp for tp in powers_of_two(min(gpu.gpus_per_node, num_gpus)) if model.heads % tp == 0]
    pps = [limits.pp] if limits.pp else [pp for pp in range(1, max_pp + 1) if model.num_layers % pp == 0 and num_gpus % pp == 0]
    eps = [limits.ep] if limits.ep else [ep for ep in powers_of_two(model.moe.experts) if ep <= num_gpus] if model.moe else [1]
    cps = [limits.cp] if limits.cp else powers_of_two(limits.max_cp)
    for tp, pp, cp, ep in itertools.product(tps, pps, cps, eps):
        try:
            layout = ParallelLayout.for_world(num_gpus, tp=tp, pp=pp, cp=cp, ep=ep, etp=1 if model.moe else None, sequence_parallel=tp > 1)
            check_layout(model, layout, "layout")
        except KDError:
            continue
        yield layout


def replica_layout(base: Job, max_gpus: int) -> ParallelLayout | None:
    """The smallest teacher replica (fewest GPUs, then least pp) whose GPUs hold it; None: none up to `max_gpus`."""
    for size in powers_of_two(max_gpus):
        fitting = []
        for layout in layouts(base.teacher, size, base.gpu, max_pp=8):
            if layout.dp == 1 or layout.dp <= layout.ep:  # data parallelism within a replica only to spread experts
                stages = [teacher_stage(replace(base, teacher_layout=layout), stage) for stage in range(layout.pp)]
                fitting += [(layout.pp, layout.tp, layout)] * all(stage.fits for stage in stages)
        if fitting:
            return min(fitting, key=lambda entry: entry[:2])[2]
    return None


def splits(base: Job, num_gpus: int, pinned: int | None = None) -> Iterator[tuple[int, ParallelLayout | None, int]]:
    """(student GPUs, replica layout, replicas) for a placement on `num_gpus`; streamed: replicas near the teacher's share of FLOPs, or as pinned.
    cached: the replica that builds the cache once, which may need other GPUs."""
    if base.placement == "colocated":
        yield num_gpus, None, 0
        return
    if base.placement == "cached":
        yield num_gpus, replica_layout(base, MAX_BUILD_GPUS), 0
        return
    one = replica_layout(base, num_gpus // 2)
    if one is None:
        return
    f = teacher_share(base)[1]
    ideal = max(1, round(f * num_gpus / one.world_size))
    for replicas in range(1, (num_gpus - 1) // one.world_size + 1):
        student = num_gpus - replicas * one.world_size
        near = abs(replicas - ideal) <= 1 or student & (student - 1) == 0 and replicas <= 4 * ideal
        if replicas == pinned if pinned else near:
            yield student, one, replicas


def near_batch(asked: int, multiple: int) -> int:
    """The multiple nearest to `asked` where it is at most a fifteenth away, else `asked`: 14 GPUs cannot run a batch of 256, but can one of 252."""
    near = max(1, round(asked / multiple)) * multiple
    return near if abs(near - asked) * 15 <= asked else asked


def search(template: Job, placement: Placement, num_gpus: int, rates: Rates, *, limits: Limits = Limits(), keep: int = 3,
           cache_epochs: int = 1) -> Found:
    """The `keep` best jobs of `placement` on `num_gpus` GPUs by GPU-hours a token. `template` gives everything that is not searched."""
    start = template
    if placement != "colocated":
        start = replace(template, placement=placement, layout=ParallelLayout(), teacher_layout=ParallelLayout(), micro_batch=1)
    found: list[Candidate] = []
    tally = _Tally()
    for student_gpus, teacher_layout, replicas in splits(start, num_gpus, limits.replicas):
        for layout in layouts(template.student, student_gpus, template.gpu, limits=limits):
            settings = _Settings(placement=placement, layout=layout, teacher_layout=teacher_layout, teacher_replicas=max(1, replicas))
            found += _best_of_layout(template, settings, rates, limits, tally, cache_epochs)
    if placement == "streamed" and not found and tally.nearest is None:
        tally.reasons["no teacher replica fits in half of the GPUs"] += 1
    found.sort(key=lambda candidate: candidate.speed.gpu_hours_per_billion)
    return Found(best=tuple(found[:keep]), reasons=dict(tally.reasons.most_common(6)), nearest=tally.nearest if not found else None,
                 nearest_job=tally.job if not found else None)


@dataclass(slots=True)
class _Tally:
    """Why jobs were left out, and which came nearest."""

    reasons: Counter = field(default_factory=Counter)
    nearest: StageMemory | None = None
    job: Job | None = None

    def over_memory(self, job: Job, tight: StageMemory) -> None:
        self.reasons[f"{tight.role} stage over memory ({tight.moment})"] += 1
        if self.nearest is None or tight.headroom > self.nearest.headroom:
            self.nearest, self.job = tight, job


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    placement: Placement
    layout: ParallelLayout
    teacher_layout: ParallelLayout | None
    teacher_replicas: int


def _best_of_layout(template: Job, settings: _Settings, rates: Rates, limits: Limits, tally: _Tally, cache_epochs: int) -> list[Candidate]:
    """The best micro-batch and recompute of one layout: a list of one, or empty."""
    best: Candidate | None = None
    micro_batches = MICRO_BATCHES if limits.micro_batch is None else (limits.micro_batch,)
    for recompute in RECOMPUTE if limits.recompute is None else (limits.recompute,):
        for micro_batch in micro_batches:
            batch = near_batch(template.global_batch, micro_batch * settings.layout.dp)
            try:
                job = replace(template, placement=settings.placement, layout=settings.layout, teacher_layout=settings.teacher_layout,
                              teacher_replicas=settings.teacher_replicas, recompute=recompute, micro_batch=micro_batch, global_batch=batch)
            except KDError as error:
                tally.reasons[str(error)] += 1
                break
            tight = worst(job)
            if not tight.fits:
                tally.over_memory(job, tight)
                break  # a larger micro-batch needs more
            candidate = Candidate(job=job, memory=tight, speed=speed(job, rates, cache_epochs=cache_epochs))
            if best is None or candidate.speed.gpu_hours_per_billion < 0.999 * best.speed.gpu_hours_per_billion:
                best = candidate
    return [] if best is None else [best]


def recommendation(by_placement: dict[Placement, Found]) -> str:
    """One sentence: the placement to take and why."""
    best = {placement: found.best[0] for placement, found in by_placement.items() if found.best}
    if not best:
        return "Nothing fits: take more GPUs, larger ones, a shorter sequence, or a smaller teacher."
    if "colocated" in best and "streamed" in best:
        r, f = teacher_share(best["streamed"].job)
        colocated, streamed = best["colocated"].speed, best["streamed"].speed
        gain = colocated.gpu_hours_per_billion / streamed.gpu_hours_per_billion
        if gain > LEAST_GAIN:
            return (f"Streamed: {gain:.2f}x the tokens per GPU-hour of colocated, through what the freed memory buys "
                    f"({changes(best['colocated'].job, best['streamed'].job)}); the teacher has {r:.0%} of the GPUs and {f:.0%} of the FLOPs.")
        text = (f"Colocated: it fits, and by FLOPs alone streamed cannot beat it on the same number of GPUs "
                f"(at most {streamed_over_colocated(r, f):.2f}x with {r:.0%} of the GPUs for {f:.0%} of the FLOPs).")
    elif "streamed" in best:
        text = f"Streamed: colocated does not fit ({by_placement['colocated'].why_none if 'colocated' in by_placement else 'not asked'})."
    elif "colocated" in best:
        text = f"Colocated: streamed does not fit ({by_placement['streamed'].why_none if 'streamed' in by_placement else 'not asked'})."
    else:
        return "Cached: it fits" + (", and neither colocated nor streamed does." if len(by_placement) == len(PLACEMENTS) else ".")
    if "cached" in best:
        hours = best["cached"].speed.gpu_hours_per_billion
        text += f" For more than one pass over the same data a cache costs {hours:.0f} GPU-hours per billion tokens, its build included."
    return text


def changes(before: Job, after: Job) -> str:
    """What differs between two jobs' student settings."""
    out = [f"{name} {a} -> {b}" for name, a, b in (("micro-batch", before.micro_batch, after.micro_batch), ("tp", before.layout.tp, after.layout.tp),
                                                   ("pp", before.layout.pp, after.layout.pp),
                                                   ("recompute", before.recompute, after.recompute)) if a != b]
    return ", ".join(out) or "a layout of the teacher's own"
