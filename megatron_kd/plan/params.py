"""Weights of a model, tensor by tensor, and their share of one rank.

Owns the parameter counts: embedding, attention, gated delta net, dense and mixture-of-experts MLPs, norms, head. Names and fusions are
Megatron's (q/k/v in one tensor, gate and up in one), so that local sizes are those that Megatron allocates; the totals equal the
Hugging Face model's. Called by memory, traffic and balance. No torch.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron_kd.errors import PlanError, rule
from megatron_kd.layout import ParallelLayout
from megatron_kd.plan.models import ModelShape

Shard = Literal["tp", "copy", "expert", "expert_bias"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight:
    """One tensor (of one expert, where it belongs to one)."""

    name: str
    """Megatron's name within its layer."""
    numel: int
    """Elements over all ranks, of one expert."""
    shard: Shard = "tp"
    """tp: split over tensor parallel; copy: on every rank; expert: split over etp; expert_bias: whole on each etp rank."""
    copies: int = 1
    """Experts that have such a tensor; they are spread over ep."""
    group: str = "attention"
    """Component for tables: embedding, attention, gdn, mlp, experts, router, norm, head."""

    @property
    def total(self) -> int:
        """Elements in the whole model."""
        return self.numel * self.copies

    @property
    def is_expert(self) -> bool:
        """Whether its gradients are reduced over expert data parallelism."""
        return self.shard in ("expert", "expert_bias")

    def local(self, layout: ParallelLayout) -> tuple[int, int]:
        """(elements of one tensor on one rank, tensors of this kind there)."""
        parts = {"tp": layout.tp, "copy": 1, "expert": layout.expert_tp, "expert_bias": 1}[self.shard]
        return self.numel // parts, self.copies // layout.ep if self.is_expert else self.copies


def mixer_weights(model: ModelShape, layer: int) -> list[Weight]:
    """Input norm and token mixer of decoder layer `layer`."""
    h, kind = model.hidden, model.mixers[layer]
    if kind == "gdn":
        g = model.gdn
        return [
            Weight(name="dt_bias", numel=g.value_heads, group="gdn"),
            Weight(name="A_log", numel=g.value_heads, group="gdn"),
            Weight(name="in_proj.layer_norm", numel=h, shard="copy", group="norm"),
            Weight(name="in_proj", numel=(2 * g.qk + 2 * g.v + 2 * g.value_heads) * h, group="gdn"),
            Weight(name="conv1d", numel=(2 * g.qk + g.v) * g.conv, group="gdn"),
            Weight(name="out_norm", numel=g.value_dim, shard="copy", group="norm"),
            Weight(name="out_proj", numel=g.v * h, group="gdn"),
        ]
    width = model.q * (2 if model.output_gate else 1) + 2 * model.kv
    out = [Weight(name="core_attention.softmax_offset", numel=model.heads)] * model.sinks
    out += [Weight(name="linear_proj", numel=model.q * h)]
    out += [Weight(name="linear_proj.bias", numel=h, shard="copy")] * model.linear_bias
    out += [Weight(name="linear_qkv.layer_norm", numel=h, shard="copy", group="norm"), Weight(name="linear_qkv", numel=width * h)]
    out += [Weight(name="linear_qkv.bias", numel=width)] * model.qkv_bias
    out += [Weight(name=name, numel=model.head_dim, shard="copy", group="norm") for name in ("q_layernorm", "k_layernorm")] * model.qk_norm
    return out


def mlp_weights(model: ModelShape) -> list[Weight]:
    """Pre-MLP norm and MLP or mixture of experts of one decoder layer."""
    h = model.hidden
    if model.moe is None:
        return [Weight(name="linear_fc1.layer_norm", numel=h, shard="copy", group="norm"),
                Weight(name="linear_fc1", numel=2 * model.ffn * h, group="mlp"),
                Weight(name="linear_fc2", numel=model.ffn * h, group="mlp")]
    m = model.moe
    out = [Weight(name="pre_mlp_layernorm", numel=h, shard="copy", group="norm"),
           Weight(name="router", numel=m.experts * h, shard="copy", group="router")]
    out += [Weight(name="router.bias", numel=m.experts, shard="copy", group="router")] * model.linear_bias
    out += [Weight(name="experts.linear_fc1", numel=2 * m.ffn * h, shard="expert", copies=m.experts, group="experts"),
            Weight(name="experts.linear_fc2", numel=m.ffn * h, shard="expert", copies=m.experts, group="experts")]
    if model.linear_bias:
        out += [Weight(name="experts.linear_fc1.bias", numel=2 * m.ffn, shard="expert", copies=m.experts, group="experts"),
                Weight(name="experts.linear_fc2.bias", numel=h, shard="expert_bias", copies=m.experts, group="experts")]
    if m.shared_ffn:
        out += [Weight(name="shared_experts.gate", numel=h, shard="copy", group="mlp"),
                Weight(name="shared_experts.linear_fc1", numel=2 * m.shared_ffn * h, group="mlp"),
                Weight(name="shared_experts.linear_fc2", numel=m.shared_ffn * h, group="mlp")]
    return out


def layer_weights(model: ModelShape, layer: int) -> list[Weight]:
    """All weights of decoder layer `layer`."""
    return mixer_weights(model, layer) + mlp_weights(model)


def stage_layers(model: ModelShape, layout: ParallelLayout, stage: int) -> list[int]:
    """Indices of the decoder layers that pipeline stage `stage` holds (all its virtual chunks). Errors: PlanError where they do not divide."""
    chunks = layout.pp * (layout.vpp or 1)
    if model.num_layers % chunks:
        raise PlanError(rule("pp", layout.pp, f"{model.name} has {model.num_layers} layers, which must divide by pp x vpp = {chunks}",
                             "Choose a divisor"))
    size = model.num_layers // chunks
    return [i for i in range(model.num_layers) if (i // size) % layout.pp == stage]


def stage_kinds(model: ModelShape, layout: ParallelLayout, stage: int) -> list[tuple[int, int]]:
    """(index of one such layer, how many) for each kind of layer on a stage: layers of one kind have equal sizes."""
    counts: dict[str, list[int]] = {}
    for layer in stage_layers(model, layout, stage):
        kind = "gdn" if model.mixers[layer] == "gdn" else "attention"
        counts.setdefault(kind, [layer, 0])[1] += 1
    return [(first, num) for first, num in counts.values()]


@lru_cache(maxsize=4096)
def stage_weights(model: ModelShape, layout: ParallelLayout, stage: int, *, head: bool = True) -> tuple[Weight, ...]:
    """Weights on pipeline stage `stage`: embedding on the first, final norm and head on the last (without it where `head` is False). A tied
    head is a second copy on the last stage where pp > 1, and no tensor of its own where pp == 1."""
    rows = padded_vocab(model, layout.tp)
    out = [weight for layer in stage_layers(model, layout, stage) for weight in layer_weights(model, layer)]
    if stage == 0:
        out = [Weight(name="embedding", numel=rows * model.hidden, group="embedding")] + out
    if stage == layout.pp - 1:
        out.append(Weight(name="final_layernorm", numel=model.hidden, shard="copy", group="norm"))
        if head and not (model.tied and layout.pp == 1):
            out.append(Weight(name="output_layer", numel=rows * model.hidden, group="head"))
    return tuple(out)


def padded_vocab(model: ModelShape, tp: int) -> int:
    """Rows of embedding and head over all ranks: the checkpoint's, padded to a multiple of tp (as mcore/model.py asks Bridge to)."""
    return -(-model.vocab // tp) * tp


def total_params(model: ModelShape) -> int:
    """Elements of the whole model; equals the Hugging Face model's count (without MTP and vision)."""
    return sum(weight.total for weight in stage_weights(model, ParallelLayout(), 0))


def params_by_group(model: ModelShape) -> dict[str, int]:
    """Elements by component."""
    out: dict[str, int] = {}
    for weight in stage_weights(model, ParallelLayout(), 0):
        out[weight.group] = out.get(weight.group, 0) + weight.total
    return out


def adapter_numel(model: ModelShape, layout: ParallelLayout, stage: int, rank: int) -> int:
    """Elements of low-rank adapters on one rank: rank x (inputs + outputs) for each linear layer's weight, one for all experts of a layer; the side
    that is split over tp counts a share."""
    total = 0
    for layer in stage_layers(model, layout, stage):
        for weight in layer_weights(model, layer):
            is_linear = weight.group not in ("norm", "router") and weight.numel % model.hidden == 0
            if not is_linear or weight.name.endswith(".bias") or weight.name in ("dt_bias", "A_log", "conv1d", "shared_experts.gate"):
                continue
            total += rank * (model.hidden + weight.numel // model.hidden // layout.tp)
    return total


@lru_cache(maxsize=64)
def active_matmul_params(model: ModelShape) -> int:
    """Weights that multiply each token in the decoder: without embedding, norms and head, with top_k of the experts."""
    active = 0
    for layer in range(model.num_layers):
        for weight in layer_weights(model, layer):
            if weight.group == "norm" or weight.name in ("dt_bias", "A_log", "conv1d"):
                continue
            active += weight.total * model.moe.top_k // model.moe.experts if weight.is_expert else weight.total
    return active


@lru_cache(maxsize=4096)
def local_numel(weights: tuple[Weight, ...], layout: ParallelLayout, *, expert: bool | None = None) -> int:
    """Elements on one rank; `expert` True or False counts only those."""
    return sum(math.prod(weight.local(layout)) for weight in weights if expert is None or weight.is_expert == expert)


@lru_cache(maxsize=4096)
def buffer_numel(weights: tuple[Weight, ...], layout: ParallelLayout, *, expert: bool, num_shards: int) -> int:
    """Elements of Megatron's gradient buffer for one group under the distributed optimizer: each tensor starts at a multiple of 64, the
    end is padded to lcm(shards, 128) (core/optimizer/param_layout.py; one bucket)."""
    end = 0
    for weight in weights:
        if weight.is_expert == expert:
            n, num = weight.local(layout)
            end = _up(end, 64) + _up(n, 64) * (num - 1) + n
    return _up(end, math.lcm(num_shards, 128))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def check_layout(model: ModelShape, layout: ParallelLayout, role: str) -> None:
    """PlanError, with the rule, for a layout that Megatron cannot build for this model (or builds wrongly)."""
    def refuse(name: str, got: int, why: str, way_out: str) -> None:
        raise PlanError(rule(f"{role}.{name}", got, f"{model.name}: {why}", way_out))

    stage_layers(model, layout, 0)
    if model.heads % layout.tp:
        refuse("tp", layout.tp, f"{model.heads} attention heads must divide by tp", "Choose a divisor")
    if model.kv_heads % layout.tp and layout.tp % model.kv_heads:
        refuse("tp", layout.tp, f"{model.kv_heads} key/value heads must divide by tp, or tp by them", "Choose another tp")
    if model.gdn is not None and (model.gdn.key_heads % layout.tp or model.gdn.value_heads % layout.tp):
        refuse("tp", layout.tp, f"{model.gdn.key_heads} and {model.gdn.value_heads} delta-net heads must divide by tp", "Choose a divisor")
    if model.gdn is not None and layout.tp > 1 and not layout.sequence_parallel:
        refuse("tp", layout.tp, "without sequence parallelism Megatron does not reduce the delta net's out_norm gradient over tp",
               "Set sequence_parallel")
    if model.moe is None:
        if layout.ep > 1:
            refuse("ep", layout.ep, "a dense model has no experts", "Set ep=1")
        return
    if model.moe.experts % layout.ep:
        refuse("ep", layout.ep, f"{model.moe.experts} experts must divide by ep", "Choose a divisor")
    if model.moe.ffn % layout.expert_tp:
        refuse("etp", layout.expert_tp, f"the experts' inner width {model.moe.ffn} must divide by etp", "Choose a divisor")
    if model.linear_bias and layout.expert_tp > 1:
        refuse("etp", layout.expert_tp, "experts with bias need etp=1", "Set etp=1")
    if layout.tp > 1 and not layout.sequence_parallel:
        refuse("tp", layout.tp, "experts with tp > 1 need sequence parallelism", "Set sequence_parallel")
