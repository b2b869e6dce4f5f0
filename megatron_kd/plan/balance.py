"""Speed, balance and cost of a placement, from FLOPs and rates.

Owns the time model: compute at `efficiency` of the GPU's peak, tensor/expert/context traffic added to it, pipeline bubble on top, data and
pipeline traffic hidden unless longer than compute. The efficiencies are assumptions until a measured run replaces them (`Rates.measured`).
Called by search, report and tests. Only comparisons between placements should be read from it without a measured run.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_kd.errors import PlanError, rule
from megatron_kd.plan.flops import decoder_flops, loss_flops, student_flops, teacher_flops
from megatron_kd.plan.job import Job
from megatron_kd.plan.traffic import Flow, student_flows, target_traffic, teacher_flows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Shares of the GPU's peak that each part reaches, or measured speeds."""

    dense: float = 0.45
    """Dense decoder, forward and backward. Assumed."""
    moe: float = 0.30
    """Mixture-of-experts or delta-net decoder. Assumed."""
    loss: float = 0.60
    """The fused loss: 600 of 989 TFLOP/s were measured on an H200."""
    student_tokens_s_gpu: float | None = None
    """Measured tokens a second and GPU of the student's whole step with its loss; replaces `dense`, `moe`, `loss` and traffic."""
    teacher_tokens_s_gpu: float | None = None
    """Measured tokens a second and GPU of the teacher's forward."""

    @classmethod
    def measured(cls, path: str) -> "Rates":
        """From a run's JSON with `student_tokens_per_s_per_gpu` and/or `teacher_tokens_per_s_per_gpu`, or the summary.json of a streamed or cached
        training run, whose speed is the student's. Errors: PlanError."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise PlanError(rule("--measured", path, f"cannot be read as JSON: {e}", "Pass the JSON of a measured run")) from e
        student, teacher = (values.get(f"{side}_tokens_per_s_per_gpu") for side in ("student", "teacher"))
        if student is None and values.get("tokens_per_s") and values.get("placement") in ("streamed", "cached"):
            degrees = dict(part.split("=") for part in values.get("layout", "").split() if "=" in part)
            student = values["tokens_per_s"] / math.prod(int(degrees.get(axis, 1)) for axis in ("tp", "pp", "cp", "dp"))
        if student is None and teacher is None:
            raise PlanError(rule("--measured", path, "needs {student,teacher}_tokens_per_s_per_gpu or the summary of a streamed or cached run",
                                 "Add the key that you measured (a colocated run's speed is of both models together)"))
        if any(value is not None and not value > 0 for value in (student, teacher)):
            raise PlanError(rule("--measured", (student, teacher), "tokens a second must be above 0", "Measure after warm-up"))
        return cls(student_tokens_s_gpu=student, teacher_tokens_s_gpu=teacher)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What one placement achieves."""

    step_s: float
    """Seconds a step, the slower of student and teacher where they overlap."""
    student_s: float
    """Seconds a step that the student computes."""
    teacher_s: float
    """Seconds a step that the teacher computes: added when colocated, overlapped when streamed, 0 when cached."""
    tokens_s: float
    """Tokens a second of the run."""
    gpu_hours_per_billion: float
    """GPU-hours per billion tokens, teacher GPUs and one cache build included."""
    bubble: float
    """Share of the student's time lost to pipeline fill and drain."""
    replicas_needed: int
    """streamed: teacher replicas so that the student does not wait; 0 otherwise."""
    ring_depth_needed: int
    """streamed: slots so that one answer's latency is hidden; 0 otherwise."""
    network_gb_s: float
    """Network traffic that a student GPU must carry, GB/s, over the step."""
    network_limit: str | None
    """What the network limits, or None."""


def _decoder_share(model, rates: Rates) -> float:
    return rates.moe if model.moe is not None else rates.dense


def _exposed_s(flows: list[Flow], job: Job, names: tuple[str, ...]) -> float:
    chosen = [flow for flow in flows if flow.name in names]
    return sum(flow.nvlink_bytes for flow in chosen) / job.gpu.nvlink_bytes_s + sum(flow.network_bytes for flow in chosen) / job.gpu.network_bytes_s


def student_seconds(job: Job, rates: Rates) -> tuple[float, float]:
    """(seconds of one step of the student, share lost to the pipeline bubble)."""
    layout, m = job.layout, job.num_micro_batches
    bubble = (layout.pp - 1) / (m * (layout.vpp or 1) + layout.pp - 1)
    if rates.student_tokens_s_gpu:
        return job.tokens_per_step / (rates.student_tokens_s_gpu * layout.world_size), bubble
    peak, tokens = job.gpu.bf16_flops, job.tokens_per_step
    decoder = tokens * student_flops(job) / (layout.world_size * peak * _decoder_share(job.student, rates))
    # only the last stage runs the loss: the others wait for it
    loss = tokens * loss_flops(job) * layout.pp / (layout.world_size * peak * rates.loss)
    flows = student_flows(job)
    busy = decoder + loss + _exposed_s(flows, job, ("tp", "ep", "cp"))
    return max(busy / (1 - bubble), _exposed_s(flows, job, ("dp", "dp of experts", "pp"))), bubble


def teacher_seconds(job: Job, rates: Rates) -> float:
    """Seconds of the teacher's forward over one step's tokens on all its GPUs (one replica of `teacher_shard` where cached)."""
    layout = job.teacher_shard
    gpus = layout.world_size if job.placement != "streamed" else job.teacher_gpus
    if rates.teacher_tokens_s_gpu:
        return job.tokens_per_step / (rates.teacher_tokens_s_gpu * gpus)
    compute = job.tokens_per_step * teacher_flops(job) / (gpus * job.gpu.bf16_flops * _decoder_share(job.teacher, rates))
    return compute + _exposed_s(teacher_flows(job), job, ("tp", "ep", "cp"))


def replicas_needed(job: Job, rates: Rates) -> int:
    """Teacher replicas so that streamed rows arrive as fast as the student consumes them."""
    one = teacher_seconds(replace(job, placement="streamed", teacher_replicas=1), rates)
    return max(1, math.ceil(one / student_seconds(job, rates)[0] - 1e-9))


def ring_depth_needed(job: Job, rates: Rates) -> int:
    """Slots that hide the latency of one answer (queueing behind the other data-parallel ranks, forward, transfer); at least 2."""
    replicas = job.teacher_replicas * job.teacher_shard.dp
    per_answer = teacher_seconds(job, rates) * replicas / (job.global_batch / job.micro_batch)
    queue = math.ceil(job.layout.dp / replicas)
    transfer = job.micro_batch * job.seq * job.row_share * job.teacher.hidden * 2 / job.teacher_shard.tp / job.gpu.network_bytes_s
    interval = student_seconds(job, rates)[0] / job.num_micro_batches
    return max(2, 1 + math.ceil((per_answer * queue + transfer) / interval - 1e-9))


def speed(job: Job, rates: Rates, *, cache_epochs: int = 1) -> Speed:
    """Seconds, tokens a second and GPU-hours of `job`. `cache_epochs`: passes over the data that one cache build serves."""
    student_s, bubble = student_seconds(job, rates)
    teacher_s = teacher_seconds(job, rates)
    replicas = depth = 0
    step_s, extra_gpu_s = student_s, 0.0
    if job.placement == "colocated":
        step_s = student_s + teacher_s
    elif job.placement == "streamed":
        replicas, depth = replicas_needed(job, rates), ring_depth_needed(job, rates)
        step_s = max(student_s, teacher_s)
    else:
        head_flops = job.tokens_per_step * 2.0 * job.teacher.vocab * job.teacher.hidden if job.payload == "topk" else 0.0
        extra_gpu_s = (teacher_s * job.teacher_shard.world_size + head_flops / (job.gpu.bf16_flops * rates.loss)) / cache_epochs
        teacher_s = 0.0
    flows = student_flows(job)
    received = target_traffic(job).hidden_bytes * job.layout.pp / job.layout.world_size if job.placement == "streamed" else 0.0
    network = sum(flow.network_bytes for flow in flows) + received
    limit = _network_limit(job, flows, step_s)
    gpu_s = step_s * job.num_gpus + extra_gpu_s
    return Speed(step_s=step_s, student_s=student_s, teacher_s=teacher_s, tokens_s=job.tokens_per_step / step_s,
                 gpu_hours_per_billion=gpu_s / job.tokens_per_step * 1e9 / 3600, bubble=bubble, replicas_needed=replicas, ring_depth_needed=depth,
                 network_gb_s=network / step_s / 1e9, network_limit=limit)


def _network_limit(job: Job, flows: list[Flow], step_s: float) -> str | None:
    """What would take longer on the network than the step computes."""
    rate = job.gpu.network_bytes_s
    for flow in flows + teacher_flows(job):
        if flow.network_bytes / rate > step_s:
            return f"{flow.name}: {flow.network_bytes / step_s / 1e9:.1f} GB/s needed, {rate / 1e9:.0f} GB/s there"
    return None


def teacher_share(job: Job) -> tuple[float, float]:
    """(r, f): the teacher's share of the GPUs (streamed), and of the decoder and loss FLOPs."""
    student = student_flops(job) + loss_flops(job)
    teacher = decoder_flops(job.teacher, job.seq)
    return job.teacher_gpus / job.num_gpus, teacher / (student + teacher)


def streamed_over_colocated(r: float, f: float) -> float:
    """Upper bound, by FLOPs alone, of streamed speed over colocated speed on the same number of GPUs: (1 - r) / (1 - f) while the teacher keeps
    up (r >= f), r / f where it does not. Never above 1."""
    if not 0 < f < 1 or not 0 <= r < 1:
        raise PlanError(rule("(r, f)", (r, f), "must be shares between 0 and 1", "Give the teacher's share of GPUs and of FLOPs"))
    return min((1 - r) / (1 - f), r / f)
