"""What the student reads and how long it trains: DataConfig, TrainConfig. Part of the recipe (config/schema.py). Torch-free."""

from dataclasses import dataclass
from typing import Literal

from megatron_kd.config.fields import not_negative, positive
from megatron_kd.errors import ConfigError, rule


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What the student reads."""

    kind: Literal["text", "gpt", "sft", "mock"] = "mock"
    """text: raw text, preprocessed once to Megatron's indexed format; gpt: such files already made; sft: packed prompt/answer JSONL;
    mock: random ids."""
    seq_length: int = 2048
    """Tokens a sequence; with sequence parallelism a multiple of tp."""
    text: str | None = None
    """kind text: a .txt or .jsonl file, a folder of them, or `python:MODULE.ATTRIBUTE` for a dict of documents that Python carries."""
    text_key: str = "text"
    """Field of a JSONL record that holds the text."""
    held_out: float = 0.1
    """kind text: share of whole documents kept out of training for evaluation."""
    paths: list[str] | None = None
    """kind gpt: prefixes of .bin/.idx pairs, optionally with weights before them as in Megatron (`0.3 a 0.7 b`)."""
    split: str = "969,30,1"
    """kind gpt: shares of train, validation and test."""
    sft_dir: str | None = None
    """kind sft: folder with training.jsonl and validation.jsonl."""
    packed: bool = False
    """kind sft: pack sequences (THD)."""
    cache_dir: str | None = None
    """Prepared files; None: `output_dir`/data."""
    num_workers: int = 0
    """Loader processes a rank."""
    max_documents: int | None = None
    """kind text: read only this many documents."""

    def __post_init__(self):
        positive(self, "seq_length", "max_documents")
        not_negative(self, "num_workers")
        if not 0.0 < self.held_out < 1.0:
            raise ConfigError(rule("data.held_out", self.held_out, "must be between 0 and 1", "0.1 keeps one document in ten for evaluation"))
        for kind, name in (("text", "text"), ("gpt", "paths"), ("sft", "sft_dir")):
            if self.kind == kind and not getattr(self, name):
                raise ConfigError(rule(f"data.{name}", getattr(self, name), f"data.kind={kind} needs it", f"Set data.{name}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Optimisation, evaluation, checkpoints, logs."""

    iters: int
    """Training steps."""
    global_batch: int = 1
    """Sequences a step over all data-parallel ranks."""
    micro_batch: int = 1
    """Sequences of one forward pass on one rank."""
    lr: float = 1e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after warm-up."""
    warmup_iters: int = 0
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """AdamW's decoupled decay."""
    adam_beta1: float = 0.9
    """First moment."""
    adam_beta2: float = 0.95
    """Second moment."""
    clip_grad: float = 1.0
    """Global gradient norm limit; 0 switches it off."""
    seed: int = 1234
    """Data order and initialisation."""
    eval_interval: int | None = None
    """Steps between evaluations; None: only before and after."""
    eval_iters: int = 0
    """Global batches of an evaluation; 0: no evaluation."""
    log_interval: int = 1
    """Steps between log lines."""
    save_interval: int | None = None
    """Steps between checkpoints; None: none but the last."""
    save: bool = True
    """Write checkpoints under `output_dir`/checkpoints."""
    resume: bool = True
    """Continue from the newest checkpoint there, if there is one."""
    calculate_per_token_loss: bool = True
    """One global denominator over all micro-batches; False divides each micro-batch by its own count, as Megatron defines it."""
    distributed_optimizer: bool = False
    """Shard optimizer state over data parallelism."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while backward runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters while forward runs; needs distributed_optimizer."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute of the student."""
    rampup_batch: list[int] | None = None
    """[start, increment, samples]: Megatron's batch size ramp-up."""
    tensorboard: bool = True
    """Write TensorBoard events under `output_dir`/tensorboard."""
    wandb_project: str | None = None
    """Weights & Biases project; None: off."""
    mlflow_experiment: str | None = None
    """MLflow experiment; None: off."""
    threads_per_rank: int | None = None
    """device cpu: torch threads of a rank; None: cores / ranks, at least 1."""

    def __post_init__(self):
        positive(self, "iters", "global_batch", "micro_batch", "lr", "eval_interval", "save_interval", "log_interval", "threads_per_rank")
        not_negative(self, "min_lr", "warmup_iters", "weight_decay", "clip_grad", "eval_iters")
        if self.overlap_param_gather and not self.distributed_optimizer:
            raise ConfigError(rule("train.overlap_param_gather", True, "needs the distributed optimizer", "Set train.distributed_optimizer=true"))
