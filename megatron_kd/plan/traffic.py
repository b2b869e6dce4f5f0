"""Bytes that one GPU sends in a step, over NVLink and over the network.

Owns the traffic closed forms of both sides: tensor, pipeline, data, expert and context parallelism, and what distillation adds (hidden
states, or what dense logits and top-K would take instead). Called by balance, report and tests. Ranks are numbered tp-cp-ep-dp-pp as in
Megatron, tp fastest; a node holds `gpus_per_node` consecutive ranks. Ring collectives over n ranks send (n - 1) / n of their bytes a
rank; where k ranks of the ring share a node one hop in k leaves it.
"""

from dataclasses import dataclass

from megatron_kd.layout import ParallelLayout
from megatron_kd.plan.job import Job
from megatron_kd.plan.models import ModelShape
from megatron_kd.plan.params import local_numel, stage_layers, stage_weights
from megatron_kd.stream.sizes import request_bytes, wire_payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One kind of traffic of the busiest rank."""

    name: str
    """tp, pp, dp, ep, cp, hidden states, requests."""
    nvlink_bytes: float
    """Bytes a step that stay in the node."""
    network_bytes: float
    """Bytes a step that leave it."""

    @property
    def total_bytes(self) -> float:
        """Both."""
        return self.nvlink_bytes + self.network_bytes


def group_in_node(size: int, stride: int, gpus_per_node: int) -> int:
    """Ranks of a group (every `stride`-th rank, `size` of them) that share one node."""
    if stride >= gpus_per_node:
        return 1
    return min(size, gpus_per_node // stride)


def _ring(name: str, sent: float, size: int, stride: int, gpus_per_node: int) -> Flow:
    inside = group_in_node(size, stride, gpus_per_node)
    share = 0.0 if inside == size else 1.0 / inside
    return Flow(name=name, nvlink_bytes=sent * (1 - share), network_bytes=sent * share)


def _all_to_all(name: str, sent: float, size: int, stride: int, gpus_per_node: int) -> Flow:
    inside = group_in_node(size, stride, gpus_per_node)
    share = 0.0 if size == 1 else (size - inside) / (size - 1)
    return Flow(name=name, nvlink_bytes=sent * (1 - share), network_bytes=sent * share)


def tp_bytes(model: ModelShape, layout: ParallelLayout, tokens: int, num_layers: int, e: int, *, training: bool) -> float:
    """Bytes that a rank sends for tensor parallelism in one micro-batch: two regions a layer (attention; a dense MLP or shared expert), each one
    all-reduce (or, with sequence parallelism, all-gather and reduce-scatter) forward, the same backward, and with sequence parallelism the
    input gathered again for the weight gradient."""
    if layout.tp == 1:
        return 0.0
    regions = 1 if model.moe is not None and not model.moe.shared_ffn else 2
    passes = 2.0 if not training else (5.0 if layout.sequence_parallel else 4.0)
    return num_layers * regions * passes * (layout.tp - 1) / layout.tp * tokens * model.hidden * e


def ep_bytes(model: ModelShape, layout: ParallelLayout, tokens: int, num_layers: int, e: int, *, training: bool) -> float:
    """Bytes that a rank sends to dispatch and combine tokens in one micro-batch, forward (and backward); balanced routing."""
    if model.moe is None or layout.ep == 1:
        return 0.0
    own = tokens / (layout.tp if layout.sequence_parallel else 1)
    return num_layers * (4 if training else 2) * own * model.moe.top_k * model.hidden * e * (layout.ep - 1) / layout.ep


def cp_bytes(model: ModelShape, layout: ParallelLayout, tokens: int, layers: list[int], e: int, *, training: bool) -> float:
    """Bytes that a rank sends for context parallelism in one micro-batch: keys and values round the ring forward, and they and their gradients
    backward; a delta net exchanges heads for positions (all-to-all) before and after, and back."""
    if layout.cp == 1:
        return 0.0
    total = 0.0
    for layer in layers:
        if model.mixers[layer] == "gdn":
            g = model.gdn
            total += (2 if training else 1) * (2 * g.qk + 3 * g.v + 2 * g.value_heads) / layout.tp * tokens * e * (layout.cp - 1) / layout.cp
        else:
            total += (3 if training else 1) * (layout.cp - 1) * tokens * 2 * model.kv / layout.tp * e
    return total


def dp_bytes(model: ModelShape, layout: ParallelLayout, stage: int, e: int, *, distributed_optimizer: bool) -> tuple[float, float]:
    """(dense, expert) bytes that a rank sends in a step to reduce fp32 gradients and, with the distributed optimizer, gather weights."""
    weights = stage_weights(model, layout, stage)
    dense_ranks = layout.dp * layout.cp
    expert_ranks = max(1, layout.tp * layout.cp * layout.dp // (layout.ep * layout.expert_tp))
    per_param = 4 + e if distributed_optimizer else 8
    dense = local_numel(weights, layout, expert=False) * per_param * (dense_ranks - 1) / dense_ranks
    expert = local_numel(weights, layout, expert=True) * per_param * (expert_ranks - 1) / expert_ranks
    return dense, expert


def _model_flows(job: Job, model: ModelShape, layout: ParallelLayout, micro_batches: float, *, training: bool, stage: int) -> list[Flow]:
    node, e = job.gpu.gpus_per_node, job.dtype_bytes
    tokens = job.micro_batch * job.seq // layout.cp
    layers = stage_layers(model, layout, stage)
    again = 1 + (1 / 2 if training and job.recompute == "full" else 0)  # forward's collectives once more
    flows = [
        _ring("tp", micro_batches * again * tp_bytes(model, layout, tokens, len(layers), e, training=training), layout.tp, 1, node),
        _ring("cp", micro_batches * again * cp_bytes(model, layout, tokens, layers, e, training=training), layout.cp, layout.tp, node),
        _all_to_all("ep", micro_batches * again * ep_bytes(model, layout, tokens, len(layers), e, training=training), layout.ep, layout.expert_tp,
                    node),
    ]
    if layout.pp > 1:
        boundary = tokens * model.hidden * e / (layout.tp if layout.sequence_parallel else 1)
        sent = micro_batches * boundary * (2 if training else 1) * (layout.vpp or 1)
        flows.append(_ring("pp", sent, 2, layout.world_size // layout.pp, node))
    if training:
        dense, expert = dp_bytes(model, layout, stage, e, distributed_optimizer=job.distributed_optimizer)
        flows.append(_ring("dp", dense, layout.dp * layout.cp, layout.tp, node))
        flows.append(_ring("dp of experts", expert, max(1, layout.tp * layout.cp * layout.dp // (layout.ep * layout.expert_tp)),
                           layout.ep * layout.expert_tp, node))
    return [flow for flow in flows if flow.total_bytes]


def student_flows(job: Job) -> list[Flow]:
    """Bytes a step that one student rank sends (that of the busiest stage for data parallelism: the last)."""
    return _model_flows(job, job.student, job.layout, job.num_micro_batches, training=True, stage=job.layout.pp - 1)


def teacher_flows(job: Job) -> list[Flow]:
    """Bytes a step that one teacher rank sends within its replica, and its share of the rows (over the network)."""
    layout = job.teacher_shard
    if job.placement == "cached":
        return []
    replicas = layout.dp if job.placement == "colocated" else job.teacher_replicas * layout.dp
    flows = _model_flows(job, job.teacher, layout, job.global_batch / job.micro_batch / replicas, training=False, stage=layout.pp - 1)
    if job.placement == "streamed":
        rows = job.global_batch * job.seq * job.row_share / replicas
        flows.append(Flow(name="hidden states", nvlink_bytes=0.0, network_bytes=wire_payload_bytes(round(rows), job.teacher.hidden) / layout.tp))
    return flows


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTraffic:
    """What the teacher's knowledge costs on the wire, by form, for one step of the whole run."""

    hidden_bytes: int
    """Rows of H_t bf16."""
    logits_bytes: int
    """Rows of V bf16 instead."""
    top_k_bytes: int
    """K (bf16 value, int32 id) pairs a row instead, which is not exact."""
    request_bytes: int
    """Token ids and masks that the student sends."""
    received_by_rank: float
    """Bytes a step that one rank of the student's last stage receives."""


def target_traffic(job: Job) -> TargetTraffic:
    """Closed forms: H_t x 2, V x 2 and K x 6 bytes a row."""
    rows = round(job.global_batch * job.seq * job.row_share)
    hidden = wire_payload_bytes(rows, job.teacher.hidden)
    return TargetTraffic(
        hidden_bytes=hidden, logits_bytes=rows * job.teacher.vocab * 2, top_k_bytes=rows * job.top_k * 6,
        request_bytes=request_bytes(job.global_batch, job.seq), received_by_rank=hidden / (job.layout.dp * job.layout.cp * job.layout.tp))
