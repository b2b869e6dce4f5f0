"""Settings: what the caller of attach asked for, normalised. Passed to the engine."""

from dataclasses import dataclass, field

from megatron_kd.config.schema import CacheConfig, LossConfig, StreamConfig, TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One attachment."""

    teacher: TeacherConfig
    """Which teacher, and where."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The objective."""
    stream: StreamConfig = field(default_factory=StreamConfig)
    """teacher.placement: streamed."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """teacher.placement: cached."""
    vocab_size: int | None = None
    """True vocabulary; None: the student's tokenizer's highest id + 1."""
    evaluates: bool = True
    """Whether evaluation runs the teacher and reports KD; False leaves Megatron's own loss there."""
    output_dir: str | None = None
    """The run's folder."""
