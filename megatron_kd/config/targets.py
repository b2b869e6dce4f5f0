"""Where a teacher's targets come from when it is not beside the student: StreamConfig, CacheConfig. Part of the recipe. Torch-free."""

from dataclasses import dataclass
from typing import Literal

from megatron_kd.config.fields import positive
from megatron_kd.errors import ConfigError, rule


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """The way between teacher replicas and the student (teacher.placement: streamed)."""

    rendezvous: str = "127.0.0.1:29790"
    """host:port where the student's rank 0 listens and replicas join."""
    bind: str = "127.0.0.1"
    """Address that this process's own listener binds; never 0.0.0.0 unless written here."""
    replicas: int = 1
    """Teacher replicas that must have joined before the first step."""
    ring_depth: int = 2
    """Slots of each ring; 2 is the least that overlaps. Memory a slot: rows of a micro-batch x H_t x 2 bytes / tp."""
    deadline_s: float = 120.0
    """Longest wait for the rows of one micro-batch."""
    join_deadline_s: float = 600.0
    """Longest wait for the first replicas."""
    heartbeat_s: float = 5.0
    """Interval of heartbeats; three missed ones mean lost."""
    on_teacher_loss: Literal["fail", "reroute", "ce_only"] = "fail"
    """End the run, ask another replica again, or train that step on CE alone (agreed by all ranks, counted)."""
    token_file: str | None = None
    """File with the shared secret of the channel; None: the environment variable MEGATRON_KD_TOKEN, or a fresh one that `megatron-kd run` makes."""
    checksum: Literal["auto", "on", "off"] = "auto"
    """xxh3 over the rows; auto: on for host memory, off for GPU memory."""
    rows: Literal["bf16", "fp32", "fp8"] = "bf16"
    """Row format on the wire: fp32 for an fp32 teacher on the CPU, fp8 has a scale a row."""

    def __post_init__(self):
        positive(self, "replicas", "deadline_s", "join_deadline_s", "heartbeat_s")
        if self.ring_depth < 2:
            raise ConfigError(rule("stream.ring_depth", self.ring_depth, "must be at least 2", "2 is the least that overlaps teacher and student"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The teacher's stored targets (teacher.placement: cached; `megatron-kd cache ...`)."""

    location: str | None = None
    """Folder or fsspec URL (s3://bucket/prefix); None: `output_dir`/cache."""
    payload: Literal["topk", "hidden"] = "topk"
    """Top-K log-probabilities with tail mass, or hidden rows."""
    k: int = 100
    """Kept tokens of a row."""
    selection: Literal["top", "sampled"] = "top"
    """The K largest, or K drawn by importance sampling (unbiased)."""
    log_probs: Literal["bf16", "fp32"] = "bf16"
    """Precision of stored log-probabilities; ids and tail mass are exact."""
    hidden_rows: Literal["bf16", "fp32", "fp8"] = "bf16"
    """Precision of stored hidden rows."""
    on_miss: Literal["fail", "build", "ce_only"] = "fail"
    """A segment that is not stored: end the run, run the teacher for it, or train its rows on CE alone."""
    readers: int = 2
    """Reader threads a rank."""
    prefetch: int = 4
    """Micro-batches read ahead."""
    shard_bytes: int = 256 * 2**20
    """Target size of one shard file."""
    max_sequences: int | None = None
    """Build: stop after this many sequences; None: all that the recipe trains and evaluates on."""

    def __post_init__(self):
        positive(self, "k", "readers", "prefetch", "shard_bytes", "max_sequences")
