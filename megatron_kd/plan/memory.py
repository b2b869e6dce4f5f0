"""Memory of one GPU, per pipeline stage, itemised: what stays, and what exists at the worst moment of a step.

Owns the sum; the parts come from the functions that the allocating code uses as well (loss/sizes, stream/sizes, cache/sizes) and from
params and activations. Called by search, frontier, report and tests. No torch.

A step has a few moments that can be the peak: the loss of the last stage, the backward of a layer, the embedding's gradient, the
teacher's forward. Everything that stays is there in all of them; the items say what the worst one adds. `exact` items are closed forms of
allocations, others are sums over a model of the layer (activations) or allowances (context, slack).
"""

import math
from collections import Counter
from dataclasses import dataclass

from megatron_kd.cache import sizes as cache_sizes
from megatron_kd.layout import ParallelLayout
from megatron_kd.loss import sizes as loss_sizes
from megatron_kd.plan.activations import final_norm_saved, layer_backward_extra, layer_forward_peak, layer_saved
from megatron_kd.plan.dense import DenseLoss, dense_buffers, dense_bytes
from megatron_kd.plan.gpus import MIB
from megatron_kd.plan.job import Job
from megatron_kd.plan.params import Weight, adapter_numel, buffer_numel, local_numel, padded_vocab, stage_kinds, stage_weights
from megatron_kd.stream import sizes as stream_sizes

CUDA_CONTEXT = 700 * MIB
"""CUDA context with cuBLAS, NCCL and Triton modules loaded; not seen by PyTorch's allocator. Allowance."""
NCCL_COMMUNICATOR = 200 * MIB
"""NCCL buffers of one communicator of more than one rank. Allowance."""
LIBRARY_WORKSPACE = 32 * MIB
"""cuBLAS workspace that PyTorch and Transformer Engine each hold on Hopper; grouped GEMM holds four more. Inside the allocator."""
SLACK_SHARE = 0.05
"""Fragmentation, as a share of what comes and goes. Allowance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One line of a stage's memory."""

    name: str
    """What it is."""
    bytes: int
    """On one GPU."""
    group: str
    """weights, gradients, optimizer, activations, loss, targets, teacher, outside."""
    exact: bool = True
    """Closed form of an allocation; otherwise a model of a layer, or an allowance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one GPU of one pipeline stage (or of a teacher replica)."""

    role: str
    """student or teacher."""
    stage: int
    """Pipeline stage."""
    items: tuple[Item, ...]
    """Lines, largest moment included."""
    moment: str
    """What the worst moment is."""
    capacity: int
    """Bytes of the GPU."""

    @property
    def allocated(self) -> int:
        """Predicted torch.cuda.max_memory_allocated()."""
        return sum(item.bytes for item in self.items if item.group != "outside")

    @property
    def total(self) -> int:
        """With context, communicators and fragmentation."""
        return sum(item.bytes for item in self.items)

    @property
    def headroom(self) -> int:
        """Free bytes; negative where it does not fit."""
        return self.capacity - self.total

    @property
    def fits(self) -> bool:
        """Whether the GPU can hold it."""
        return self.headroom >= 0

    def group_bytes(self, group: str) -> int:
        """Sum of one group."""
        return sum(item.bytes for item in self.items if item.group == group)


def in_flight(layout: ParallelLayout, stage: int, num_micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at most, in units of its whole share of layers (1F1B; interleaved with vpp chunks)."""
    if layout.vpp is None or layout.vpp == 1:
        return min(layout.pp - stage, num_micro_batches)
    chunks = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    return min(chunks, num_micro_batches * layout.vpp) / layout.vpp


def expert_data_parallel(layout: ParallelLayout) -> int:
    """Ranks that hold the same experts."""
    return max(1, layout.tp * layout.cp * layout.dp // (layout.ep * layout.expert_tp))


def state_items(weights: tuple[Weight, ...], layout: ParallelLayout, *, dtype_bytes: int, distributed_optimizer: bool,
                trained: tuple[Weight, ...] | None = None) -> list[Item]:
    """Weights, fp32 gradients, and from step 2 on fp32 master weights (for bf16) and Adam's two moments of one rank.

    With the distributed optimizer weights and gradients live in padded buffers and the state is one shard of them; `trained` (None: all)
    are those with gradients.
    """
    trained = weights if trained is None else trained
    frozen = () if trained is weights else tuple(weight for weight in weights if weight not in trained)
    state = 12 if dtype_bytes == 2 else 8
    if not distributed_optimizer:
        n = local_numel(trained, layout)
        return [Item(name="weights", bytes=local_numel(weights, layout) * dtype_bytes, group="weights"),
                Item(name="gradients fp32", bytes=n * 4, group="gradients"),
                Item(name="optimizer state", bytes=n * state, group="optimizer")]
    def shard(is_expert: bool, padded: int, ranks: int) -> int:  # padding has no state
        return min(padded // ranks, local_numel(trained, layout, expert=is_expert))

    dense_ranks, expert_ranks = layout.dp * layout.cp, expert_data_parallel(layout)
    dense = buffer_numel(trained, layout, expert=False, num_shards=dense_ranks)
    expert = buffer_numel(trained, layout, expert=True, num_shards=expert_ranks)
    return [Item(name="weights", bytes=(dense + expert + local_numel(frozen, layout)) * dtype_bytes, group="weights"),
            Item(name="gradients fp32", bytes=(dense + expert) * 4, group="gradients"),
            Item(name="optimizer state, sharded", bytes=state * (shard(False, dense, dense_ranks) + shard(True, expert, expert_ranks)),
                 group="optimizer")]


def _activations(job: Job, stage: int) -> tuple[int, int]:
    """(bytes kept by all micro-batches in flight, worst extra of one layer's backward) of the student on `stage`."""
    spec, kinds = job.spec(), stage_kinds(job.student, job.layout, stage)
    kept = sum(layer_saved(job.student, layer, spec) * num for layer, num in kinds) * job.local_tokens * in_flight(job.layout, stage,
                                                                                                                   job.num_micro_batches)
    extra = max(layer_backward_extra(job.student, layer, spec, job.local_tokens, weight_gradients=job.lora_rank is None) for layer, _ in kinds)
    if stage == job.layout.pp - 1:
        kept += final_norm_saved(job.student, spec) * job.local_tokens
    return int(kept), extra


def _boundary(job: Job, hidden: int | None = None) -> int:
    """Bytes of one micro-batch's hidden states between layers."""
    parts = job.layout.tp if job.layout.sequence_parallel else 1
    return job.local_tokens * (hidden or job.student.hidden) * job.dtype_bytes // parts


def shard_columns(job: Job) -> int:
    """Vocabulary columns of one student rank."""
    return padded_vocab(job.student, job.layout.tp) // job.layout.tp


def _target_items(job: Job) -> list[Item]:
    """What the last stage holds of the teacher's knowledge, whatever the moment."""
    e, layout, rows = job.dtype_bytes, job.layout, job.local_rows
    if job.placement == "cached" and job.payload == "topk":
        return [Item(name=f"top-{job.top_k} targets", bytes=cache_sizes.topk_block_bytes(rows, job.top_k), group="targets")]
    held = Item(name="teacher rows of the micro-batch", bytes=rows * job.teacher.hidden * e, group="targets")
    if job.placement == "colocated":  # the head is the teacher's own; with pipelining its rows of a whole step are held
        ahead = job.num_micro_batches if layout.pp > 1 else 1
        own = [] if padded_vocab(job.teacher, layout.tp) == padded_vocab(job.student, layout.tp) else [_head(job)]
        return own + [Item(name="held teacher rows", bytes=held.bytes * ahead, group="targets")]
    if job.placement == "streamed":
        ring = stream_sizes.ring_bytes(job.ring_depth, b=job.micro_batch, s=job.seq, hidden_size=job.teacher.hidden, tp=layout.tp, cp=layout.cp)
        gathered = [held] if layout.tp > 1 and not own_teacher_rows(job) else []  # one slot is the whole micro-batch where tp == 1
        return [_head(job), Item(name=f"ring of {job.ring_depth} slots", bytes=ring, group="targets"), *gathered]
    return [_head(job), held]


def _head(job: Job) -> Item:
    return Item(name="teacher head shard", bytes=shard_columns(job) * job.teacher.hidden * job.dtype_bytes, group="teacher")


def segment_loss(size: int, count: int) -> int:
    """Bytes of segments that `count` tensors of `size` bytes each cannot use in PyTorch's caching allocator (c10/cuda/CUDACachingAllocator):
    tensors up to 1 MiB are cut from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones get a segment of their own, a
    multiple of 2 MiB. Sizes are rounded up to 512 bytes. A last segment that is not full does not count: other tensors of the pool use it.
    With expandable segments nothing is lost."""
    size = -(-size // 512) * 512
    if size >= 10 * MIB:
        return count * (-size % (2 * MIB))
    segment = (2 if size <= MIB else 20) * MIB
    return count // (segment // size) * (segment % size)


def _teacher_items(job: Job, stage: int, *, head: bool) -> list[Item]:
    """Frozen weights of `stage`, with or without the head, and the bytes of segments that they cannot use. Each is a tensor of its own in the
    allocator, unlike trained weights, which Megatron keeps in contiguous buffers. The expert matrices of a grouped linear layer are one tensor on
    Hopper; elsewhere, in fp32 or with a bias they are one an expert (mcore/experts.py: can_stack)."""
    layout = job.teacher_shard
    weights = stage_weights(job.teacher, layout, stage, head=head)
    items = [Item(name="teacher weights", bytes=local_numel(weights, layout) * job.dtype_bytes, group="teacher")]
    if job.kernels == "te":
        counts, stacked = Counter[int](), job.gpu.stacks_experts and job.dtype_bytes == 2 and not job.teacher.linear_bias
        for weight in weights:
            numel, num = weight.local(layout)
            if stacked and weight.is_expert:
                numel, num = numel * num, 1
            counts[numel * job.dtype_bytes] += num
        lost = sum(segment_loss(size, count) for size, count in counts.items())
        items.append(Item(name="allocator segments of teacher weights", bytes=lost, group="outside", exact=False))
    return items


def _forward_peak(job: Job, layout: ParallelLayout, stage: int) -> int:
    """Bytes alive while the teacher runs one micro-batch without gradient."""
    spec = job.spec(layout, training=False)
    kinds = stage_kinds(job.teacher, layout, stage)
    return int(max(layer_forward_peak(job.teacher, layer, spec) for layer, _ in kinds) * job.micro_batch * job.seq // layout.cp)


def _outside(job: Job, layout: ParallelLayout, moving: int) -> list[Item]:
    """What PyTorch's allocator does not count."""
    communicators = sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.ep, layout.dp * layout.cp)) + (layout.pp > 1)
    return [Item(name="CUDA context, communicators", bytes=CUDA_CONTEXT + communicators * NCCL_COMMUNICATOR, group="outside", exact=False),
            Item(name="fragmentation", bytes=int(moving * SLACK_SHARE), group="outside", exact=False)]


def _small(job: Job, moe: bool) -> Item:
    """Library workspaces, token tensors and rotary tables."""
    spaces = (2 + 4 * moe) * LIBRARY_WORKSPACE if job.kernels == "te" else 0
    return Item(name="workspaces, tokens, tables", bytes=spaces + job.local_tokens * 32 + job.seq * job.student.head_dim * 12, group="activations",
                exact=False)


def _state(job: Job, stage: int) -> list[Item]:
    """Weights, gradients and optimizer state of the student on `stage`; with adapters only those have the latter two."""
    layout, weights = job.layout, stage_weights(job.student, job.layout, stage)
    if job.hidden_term and job.student.hidden != job.teacher.hidden and stage == layout.pp - 1:
        weights += (Weight(name="hidden term's projection", numel=job.student.hidden * job.teacher.hidden, shard="copy", group="head"),)
    if job.lora_rank is None:
        trained = tuple(weight for weight in weights if weight.name != "output_layer") if job.freeze_head else weights
        return state_items(weights, layout, dtype_bytes=job.dtype_bytes, distributed_optimizer=job.distributed_optimizer, trained=trained)
    adapters = adapter_numel(job.student, layout, stage, job.lora_rank)
    shards = layout.dp * layout.cp if job.distributed_optimizer else 1
    return [Item(name="weights", bytes=local_numel(weights, layout) * job.dtype_bytes, group="weights"),
            Item(name="adapters", bytes=adapters * job.dtype_bytes, group="weights", exact=False),
            Item(name="gradients fp32", bytes=adapters * 4, group="gradients", exact=False),
            Item(name="optimizer state", bytes=adapters * 12 // shards, group="optimizer", exact=False)]


def student_stage(job: Job, stage: int) -> StageMemory:
    """Memory of one student GPU on pipeline stage `stage`, from step 2 on."""
    layout, last = job.layout, stage == job.layout.pp - 1
    items = _state(job, stage)
    if job.placement == "colocated":
        items += _teacher_items(job, stage, head=True)
    if last:
        items += _target_items(job)
        scratch = 0 if not job.trains_head or job.loss != "fused" else loss_sizes.head_gradient_bytes(shard_columns(job), job.student.hidden)
        items.append(Item(name="head gradient scratch fp32", bytes=scratch, group="loss"))
    items.append(_small(job, job.student.moe is not None))
    moments = _moments(job, stage)
    moment = max(moments, key=lambda name: sum(item.bytes for item in moments[name]))
    moving = sum(item.bytes for item in moments[moment])
    items += moments[moment] + _outside(job, layout, moving)
    return StageMemory(role="student", stage=stage, items=tuple(items), moment=moment, capacity=job.gpu.memory_bytes)


def _moments(job: Job, stage: int) -> dict[str, list[Item]]:
    """What comes and goes on a student stage at each moment that can be the peak."""
    layout, last = job.layout, stage == job.layout.pp - 1
    kept, extra = _activations(job, stage)
    alive = Item(name="activations", bytes=kept, group="activations", exact=False)
    table = shard_columns(job) * job.student.hidden * job.dtype_bytes
    # the head hands autograd a gradient of its weight's size; a tied one is held until the embedding's joins it
    handed = Item(name="head gradient handed to autograd", bytes=table if job.trains_head else 0, group="gradients")
    tied = [handed] if job.student.tied and layout.pp == 1 and job.trains_head else []
    moments = {"backward of a layer": [alive, Item(name="backward workspace", bytes=extra + _boundary(job), group="activations", exact=False), *tied]}
    if last:
        moments["loss"] = [alive, *_loss_items(job)]
        moments["head gradient"] = [alive, handed, Item(name="loss: dX", bytes=_boundary(job), group="loss")]
        if job.loss != "fused":  # autograd forms dX and dW from a gradient of all logits
            moments["head gradient"].append(Item(name="loss: gradient of the logits", bytes=job.local_rows * shard_columns(job) * job.dtype_bytes, group="loss"))
    if stage == 0 and job.lora_rank is None:
        flight = math.ceil(in_flight(layout, 0, job.num_micro_batches))
        moments["embedding gradient"] = [Item(name="activations", bytes=int(kept * (1 - 1 / flight)), group="activations", exact=False),
                                         Item(name="embedding gradient", bytes=table, group="gradients", exact=False), *tied]
    if job.placement == "colocated":
        # without pipelining the teacher runs when the loss asks for its rows: the student's activations are all there
        before = [] if layout.pp > 1 else [alive]
        moments["teacher forward"] = before + [Item(name="teacher activations", bytes=_forward_peak(job, job.teacher_shard, stage), group="teacher",
                                                    exact=False)]
    return moments


def own_teacher_rows(job: Job) -> bool:
    """Whether each tensor-parallel rank holds the teacher's rows of its own positions alone, and the fused loss gathers windows of them."""
    return job.placement == "streamed" and job.loss == "fused" and job.layout.sequence_parallel


def loss_shape(job: Job) -> loss_sizes.LossShape:
    """The fused loss's call of one micro-batch."""
    top_k = job.placement == "cached" and job.payload == "topk"
    return loss_sizes.LossShape(
        num_rows=job.local_rows, num_columns=shard_columns(job), hidden_s=job.student.hidden, hidden_t=0 if top_k else job.teacher.hidden,
        dtype_bytes=job.dtype_bytes, signal="top_k" if top_k else "hidden", top_k=job.top_k if top_k else 0, divergence=job.divergence,
        tp=job.layout.tp, sequence_parallel=job.layout.sequence_parallel, own_teacher_rows=own_teacher_rows(job), window_rows=job.window_rows,
        device_type="cuda" if job.kernels == "te" else "cpu", freeze_head=not job.trains_head)


def _loss_items(job: Job) -> list[Item]:
    """What the loss allocates beyond its inputs and the head gradient's scratch."""
    shape = loss_shape(job)
    if job.loss != "fused":
        buffers = dense_buffers(job.loss, shape.signal, tp=job.layout.tp, dtype_bytes=job.dtype_bytes, cross_entropy=job.cross_entropy)
        return [Item(name=f"loss: {name}", bytes=size * job.local_rows * shard_columns(job), group="loss") for name, size in buffers.items()]
    items = [Item(name=f"loss: {name}", bytes=size, group="loss") for name, size in loss_sizes.call_items(shape).items()]
    if job.row_share < 1:  # a copy of the rows whose loss mask is on
        parts = job.layout.tp if job.layout.sequence_parallel else 1
        items.append(Item(name="selected student rows", bytes=job.local_rows * job.student.hidden * job.dtype_bytes // parts, group="loss"))
    if job.micro_batch > 1 and shape.signal == "hidden" and job.placement != "cached":  # sources order rows by sequence, Megatron by position
        parts = job.layout.tp if shape.own_teacher_rows else 1
        items.append(Item(name="teacher rows in the student's order", bytes=job.local_rows * job.teacher.hidden * job.dtype_bytes // parts, group="loss"))
    return items


def dense_loss_bytes(job: Job, loss: DenseLoss = "modelopt") -> int:
    """Peak of a loss over full logits on the same rows."""
    return dense_bytes(loss, loss_shape(job).signal, num_rows=job.local_rows, num_columns=shard_columns(job), tp=job.layout.tp, dtype_bytes=job.dtype_bytes,
                       cross_entropy=job.cross_entropy)


def teacher_stage(job: Job, stage: int) -> StageMemory:
    """Memory of one GPU of a streamed teacher replica: frozen weights without the head, one forward, the registered send buffer."""
    layout = job.teacher_shard
    items = _teacher_items(job, stage, head=False)
    if stage == layout.pp - 1:
        staging = stream_sizes.staging_bytes(job.micro_batch, job.seq, job.teacher.hidden, tp=layout.tp, student_tp=job.layout.tp)
        items.append(Item(name="send buffer", bytes=staging, group="targets"))
    items.append(_small(job, job.teacher.moe is not None))
    peak = _forward_peak(job, layout, stage)
    items += [Item(name="teacher activations", bytes=peak, group="teacher", exact=False)] + _outside(job, layout, peak)
    return StageMemory(role="teacher", stage=stage, items=tuple(items), moment="teacher forward", capacity=job.gpu.memory_bytes)


def all_stages(job: Job) -> list[StageMemory]:
    """Every pipeline stage of the student, and of a streamed teacher replica."""
    out = [student_stage(job, stage) for stage in range(job.layout.pp)]
    if job.placement == "streamed":
        out += [teacher_stage(job, stage) for stage in range(job.teacher_shard.pp)]
    return out


def worst(job: Job) -> StageMemory:
    """The stage with the least headroom."""
    return min(all_stages(job), key=lambda stage: stage.headroom)


def fits(job: Job) -> bool:
    """Whether every GPU of the run can hold its stage."""
    return all(stage.fits for stage in all_stages(job))
