"""Job: everything that a plan is computed from.

One student, one teacher, one placement, their layouts, the batch, the GPU. Plain numbers, checked once here; memory, traffic and balance
trust it. Called by search, the command line and tests. No torch.
"""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_kd.errors import PlanError, rule
from megatron_kd.layout import ParallelLayout
from megatron_kd.plan.activations import ActivationSpec, Recompute
from megatron_kd.plan.dense import DenseLoss
from megatron_kd.plan.gpus import Gpu
from megatron_kd.plan.models import ModelShape
from megatron_kd.plan.params import check_layout

Placement = Literal["colocated", "streamed", "cached"]
PLACEMENTS: tuple[Placement, ...] = ("colocated", "streamed", "cached")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One distillation run as the planner sees it. Errors: PlanError with the rule."""

    student: ModelShape
    """The model that is trained."""
    teacher: ModelShape
    """The model that is distilled."""
    placement: Placement
    """Where the teacher is."""
    gpu: Gpu
    """What every rank has."""
    layout: ParallelLayout
    """The student's."""
    teacher_layout: ParallelLayout | None = None
    """streamed: one replica's; cached: that of the replica that builds the cache; None: one GPU."""
    teacher_replicas: int = 1
    """streamed: replicas that serve."""
    seq: int
    """Tokens of a sequence."""
    micro_batch: int = 1
    """Sequences of one forward on one data-parallel rank."""
    global_batch: int
    """Sequences of a step."""
    recompute: Recompute = "none"
    """The student's activation recompute."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """For recompute: selective."""
    distributed_optimizer: bool = True
    """Optimizer state split over data parallelism."""
    dtype_bytes: int = 2
    """Bytes of weights and activations: 2 for bf16 with fp32 master weights, 4 for fp32."""
    kernels: Literal["te", "torch"] = "te"
    """Implementation of the layers, see activations."""
    window_rows: int | None = None
    """Rows whose logits exist at once; None: the loss chooses."""
    ring_depth: int = 2
    """streamed: slots of each ring."""
    payload: Literal["topk", "hidden"] = "topk"
    """cached: what is stored."""
    top_k: int = 100
    """cached, payload topk: kept tokens of a row."""
    row_share: float = 1.0
    """Share of positions whose loss mask is not 0."""
    freeze_head: bool = False
    """No gradient for the student's head."""
    lora_rank: int | None = None
    """Train adapters of this rank on the linear layers only; everything else is frozen, the head included."""
    fused_activation: bool | None = None
    """Megatron's bias_activation_fusion; None: as Bridge sets it for each model's family."""
    loss: Literal["fused"] | DenseLoss = "fused"
    """Others than fused are for comparison only: full logits of the student and, with hidden rows, of the teacher (plan/dense)."""
    hidden_term: bool = False
    """Whether the loss has a term on the final hidden states; its projection is a weight of the last stage where widths differ."""
    cross_entropy: bool = False
    """Whether the loss has a cross-entropy term; costs nothing in the fused loss, a buffer in others."""
    divergence: str = "forward_kl"
    """Loss; those that need two passes keep two more numbers a row."""

    def __post_init__(self):
        check_layout(self.student, self.layout, "student")
        if self.placement == "colocated":
            check_layout(self.teacher, self.teacher_shard, "teacher (colocated, the student's layout)")
        elif self.teacher_layout is not None:
            check_layout(self.teacher, self.teacher_layout, "teacher")
        if self.teacher.vocab != self.student.vocab and abs(self.teacher.vocab - self.student.vocab) > 0.01 * self.student.vocab:
            raise PlanError(rule("vocab", (self.student.vocab, self.teacher.vocab),
                                 f"{self.student.name} and {self.teacher.name} must share one tokenizer",
                                 "Choose a pair of one family"))
        for name, model in (("student", self.student), ("teacher", self.teacher)):
            if self.seq > model.max_position:
                raise PlanError(rule("seq", self.seq, f"{name} {model.name} takes at most {model.max_position} tokens", "Plan shorter sequences"))
        parts = self.layout.cp * (2 if self.layout.cp > 1 else 1) * (self.layout.tp if self.layout.sequence_parallel else 1)
        if self.seq % parts:
            raise PlanError(rule("seq", self.seq, f"must divide by {parts} (cp halves x tp under sequence parallelism)", "Choose a multiple"))
        if self.global_batch % (self.micro_batch * self.layout.dp):
            raise PlanError(rule("global_batch", self.global_batch, f"must divide by micro_batch x dp = {self.micro_batch * self.layout.dp}",
                                 "Choose a multiple, or a smaller dp"))
        if self.layout.vpp and self.num_micro_batches % self.layout.pp:
            raise PlanError(rule("global_batch", self.global_batch, f"interleaving needs micro-batches in multiples of pp = {self.layout.pp}",
                                 "Choose a multiple"))

    @property
    def trains_head(self) -> bool:
        """Whether the student's head gets a gradient."""
        return not self.freeze_head and self.lora_rank is None

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step on one data-parallel rank."""
        return self.global_batch // (self.micro_batch * self.layout.dp)

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank (all of them on each tensor-parallel rank)."""
        return self.micro_batch * self.seq // self.layout.cp

    @property
    def local_rows(self) -> int:
        """Rows of a micro-batch that enter the loss on one context-parallel rank."""
        return round(self.local_tokens * self.row_share)

    @property
    def teacher_shard(self) -> ParallelLayout:
        """The layout that the teacher runs in."""
        if self.placement == "colocated":  # a teacher without experts ignores ep
            return replace(self.layout, vpp=None, **({"ep": 1, "etp": None} if self.teacher.moe is None else {}))
        if self.teacher_layout is not None:
            return self.teacher_layout
        return ParallelLayout()

    @property
    def teacher_gpus(self) -> int:
        """GPUs beside the student's."""
        return self.teacher_shard.world_size * self.teacher_replicas if self.placement == "streamed" else 0

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole run."""
        return self.layout.world_size + self.teacher_gpus

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.global_batch * self.seq

    def spec(self, layout: ParallelLayout | None = None, *, training: bool = True) -> ActivationSpec:
        """How a layer of the student (or of the teacher, with its layout) is split."""
        layout = layout or self.layout
        fused = self.fused_activation if self.fused_activation is not None else (self.student if training else self.teacher).fuses_activation
        return ActivationSpec(fused_activation=fused, micro_batch=self.micro_batch, tp=layout.tp, sequence_parallel=layout.sequence_parallel,
                              ep=layout.ep, expert_tp=layout.expert_tp, seq=self.seq // layout.cp,
                              kernels=self.kernels, dtype_bytes=self.dtype_bytes, recompute=self.recompute if training else "none",
                              recompute_modules=self.recompute_modules)
