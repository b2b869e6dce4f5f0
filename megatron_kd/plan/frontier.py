"""Where a placement stops fitting: the longest sequence, and the largest teacher.

Called by report, plot and tests. Searches over the same memory functions that a plan uses.
"""

import math
from dataclasses import dataclass, replace

from megatron_kd.plan.job import Job
from megatron_kd.plan.memory import StageMemory, all_stages, fits, student_stage, teacher_stage
from megatron_kd.plan.params import total_params
from megatron_kd.plan.search import layouts, powers_of_two


def sequence_unit(job: Job) -> int:
    """Step of sequence lengths that every layout takes: 256 x tp x 2 cp at most."""
    return 256 * (job.layout.tp if job.layout.sequence_parallel else 1) * (2 * job.layout.cp if job.layout.cp > 1 else 1)


def largest_sequence(job: Job) -> int | None:
    """Longest sequence (same micro-batch, multiple of sequence_unit) that fits every GPU of `job`, as far as both models go; None: not one unit."""
    unit = sequence_unit(job)
    low, high = 0, min(job.student.max_position, job.teacher.max_position) // unit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(replace(job, seq=middle * unit)):
            low = middle
        else:
            high = middle - 1
    return low * unit or None


def largest_teacher(job: Job) -> int:
    """Parameters of the largest teacher of this shape (more of the same layers) that fits beside everything else; 0: none does.

    Weights of a colocated teacher share the student's GPUs, those of a streamed one have a replica's GPUs, and so have those of the replica that
    builds a cache.
    """
    def limit(stage: StageMemory) -> float:
        weights = sum(item.bytes for item in stage.items if item.name == "teacher weights")
        return float("inf") if not weights else 1 + stage.headroom / weights

    stages = all_stages(job if job.placement == "colocated" else replace(job, placement="streamed"))
    if job.placement != "colocated" and not all(stage.fits for stage in stages if stage.role == "student"):
        return 0
    return max(0, int(min(map(limit, stages)) * total_params(job.teacher)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The largest teacher at one sequence length, by placement."""

    seq: int
    """Tokens."""
    colocated: int
    """Parameters; 0: the student itself does not fit."""
    streamed: int
    """Parameters."""


def frontier(colocated: Job | None, streamed: Job | None, num_points: int = 12) -> list[FrontierPoint]:
    """Largest teacher over sequence lengths (doubling from 1,024): colocated in its job's layout, streamed in a replica of up to half of the GPUs
    beside its job's student; with full recompute where that holds a larger one."""
    jobs = [job for job in (colocated, streamed) if job is not None]
    if not jobs:
        return []
    unit = math.lcm(*map(sequence_unit, jobs))
    out, seq = [], -(-1024 // unit) * unit
    while len(out) < num_points and seq <= min(jobs[0].student.max_position, jobs[0].teacher.max_position):
        out.append(FrontierPoint(seq=seq, colocated=_largest_at(colocated, seq), streamed=_largest_at(streamed, seq)))
        seq *= 2
    return out


def _largest_at(job: Job | None, seq: int) -> int:
    if job is None:
        return 0
    options = [replace(job, seq=seq, recompute=recompute) for recompute in {job.recompute, "full"}]
    if job.placement == "colocated":
        return max(map(largest_teacher, options))
    # only the student bounds the sequence; its teacher may have a replica of half of the GPUs
    if not any(map(_student_fits, options)):
        return 0
    half = powers_of_two(max(1, job.num_gpus // 2))[-1]
    replicas = [layout for layout in layouts(job.teacher, half, job.gpu, max_pp=8) if layout.dp == 1 or layout.dp <= layout.ep]
    return max((_replica_limit(replace(options[0], teacher_layout=layout, teacher_replicas=1)) for layout in replicas), default=0)


def _student_fits(job: Job) -> bool:
    return all(student_stage(job, stage).fits for stage in range(job.layout.pp))


def _replica_limit(job: Job) -> int:
    """Parameters of the largest teacher of this shape that one replica holds."""
    stages = [teacher_stage(job, stage) for stage in range(job.teacher_shard.pp)]
    return max(0, int(min(1 + stage.headroom / sum(item.bytes for item in stage.items if item.name == "teacher weights") for stage in stages)
                      * total_params(job.teacher)))
