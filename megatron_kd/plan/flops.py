"""Floating-point operations a token, forward: decoder matrices, attention, delta rule; and the loss's projections.

Called by balance and search. A multiply-add counts as two. Attention counts the causal half (s + 1) / 2 of the keys on average, or the
window. The delta rule counts the chunked form (chunk of 64): scores and their inverse within a chunk, state update and read-out.
"""

from functools import lru_cache

from megatron_kd.plan.activations import CHUNK
from megatron_kd.plan.job import Job
from megatron_kd.plan.models import ModelShape
from megatron_kd.plan.params import active_matmul_params


def mixing_flops(model: ModelShape, seq: int) -> float:
    """FLOPs of one token's forward in attention scores and delta rules, without any weight."""
    total = 0.0
    for kind in model.mixers:
        if kind == "gdn":
            g = model.gdn
            # within a chunk: k k^T, q k^T, the inverse and its products with k and v; across chunks: state read (twice) and update
            total += 2.0 * g.value_heads * (CHUNK * (2 * g.key_dim + g.key_dim + 2 * g.value_dim) + 3 * g.key_dim * g.value_dim)
        else:
            keys = (seq + 1) / 2 if kind == "full" or model.window is None else min(model.window, (seq + 1) / 2)
            total += 4.0 * model.q * keys
    return total


@lru_cache(maxsize=1024)
def decoder_flops(model: ModelShape, seq: int) -> float:
    """FLOPs of one token's forward through all decoder layers (embedding and head not counted)."""
    return 2.0 * active_matmul_params(model) + mixing_flops(model, seq)


def student_flops(job: Job) -> float:
    """FLOPs a token of the student's decoder: forward, as much for gradients of inputs and of weights (not with adapters), and what is recomputed."""
    forward = decoder_flops(job.student, job.seq)
    again = {"none": 0.0, "selective": mixing_flops(job.student, job.seq), "full": forward}[job.recompute]
    weight_gradients = 0.0 if job.lora_rank else 2.0 * active_matmul_params(job.student)
    return 2 * forward + mixing_flops(job.student, job.seq) + weight_gradients + again


def teacher_flops(job: Job) -> float:
    """FLOPs a token of the teacher's forward; its head runs in the loss."""
    return decoder_flops(job.teacher, job.seq)


def loss_flops(job: Job) -> float:
    """FLOPs a token of the loss: 2V(H_t + 3 H_s), without the teacher's projection for a top-K cache, with one less for a frozen head."""
    head = 2.0 * job.student.vocab
    teacher = 0.0 if job.placement == "cached" and job.payload == "topk" else head * job.teacher.hidden
    return job.row_share * (teacher + head * job.student.hidden * (3 if job.trains_head else 2))
