"""GPU models: memory, matrix rate and link rates from the vendors' data sheets.

Called by memory, traffic and balance. `memory_bytes` is what CUDA can give out (torch's total_memory) for h200-141, where it was measured: 139.80
GiB, 616 MiB less than the driver lists (nvidia-smi). For the other cards it is what the driver lists, so expect some 0.5% less there. `nvlink` and
`network` are one direction, per GPU, in bytes a second.
"""

import os
from dataclasses import dataclass

from megatron_kd.errors import PlanError, rule

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a cluster."""

    name: str
    """As given on the command line."""
    memory_bytes: int
    """Total device memory."""
    bf16_flops: float
    """Dense bf16 multiply-adds x 2 a second."""
    nvlink_bytes_s: float
    """To the GPUs of its node."""
    network_bytes_s: float = 50e9
    """To other nodes (one 400 Gb/s port a GPU unless told otherwise)."""
    gpus_per_node: int = 8
    """GPUs that NVLink joins."""
    stacks_experts: bool = False
    """Whether a frozen model's experts are one tensor a layer there (mcore/experts.py)."""


GPUS = {gpu.name: gpu for gpu in (
    Gpu(name="a100-40", memory_bytes=40_960 * MIB, bf16_flops=312e12, nvlink_bytes_s=300e9, network_bytes_s=25e9),
    Gpu(name="a100-80", memory_bytes=81_920 * MIB, bf16_flops=312e12, nvlink_bytes_s=300e9, network_bytes_s=25e9),
    Gpu(name="h100-80", memory_bytes=81_559 * MIB, bf16_flops=989e12, nvlink_bytes_s=450e9, stacks_experts=True),
    Gpu(name="h200-141", memory_bytes=143_155 * MIB, bf16_flops=989e12, nvlink_bytes_s=450e9, stacks_experts=True),
    Gpu(name="b200", memory_bytes=183_359 * MIB, bf16_flops=2250e12, nvlink_bytes_s=900e9),
    Gpu(name="gb200", memory_bytes=189_471 * MIB, bf16_flops=2500e12, nvlink_bytes_s=900e9, gpus_per_node=4),
    Gpu(name="b300", memory_bytes=275_040 * MIB, bf16_flops=2500e12, nvlink_bytes_s=900e9, network_bytes_s=100e9),
)}


def cpu(num_ranks: int) -> Gpu:
    """A rank of this machine's CPU: an equal share of its memory; 50 GFLOP/s and loopback rates are assumed."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Gpu(name="cpu rank", memory_bytes=memory // num_ranks, bf16_flops=50e9, nvlink_bytes_s=5e9, network_bytes_s=1e9,
               gpus_per_node=max(8, num_ranks))


def gpu(name: str) -> Gpu:
    """The GPU of that name. Errors: PlanError naming those known."""
    if name not in GPUS:
        raise PlanError(rule("--gpu", name, "must be one of " + ", ".join(GPUS), "Take the nearest, with --gpu-memory-gib for another size"))
    return GPUS[name]
