"""OutputLayerHook: the fused loss in place of the output layer's logits, on the last stage of a Megatron language model.

Owns how hidden states, weight and labels reach a handler. The handler runs inside the `output_layer(...)` module call, so that the forward
pre-hooks of DDP (overlap_param_gather) and FSDP fire before the weight is read. The way in is megatron-core's `output_processor`, injected by a
forward pre-hook on the unwrapped language model; models without it (HybridModel) and the cross-entropy of MTP depths get instance-level
overrides that last for one forward. Nothing is subclassed or renamed, so checkpoints and Bridge's mappings stay as they are.
Installed by attach. Shape letters: b sequences, t positions of this context-parallel rank, p positions of this rank (t / tp under SP), H width.
"""

import inspect
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megatron_kd.errors import UnsupportedLayout, rule
from megatron_kd.kernels.spec import HeadTransform
from megatron_kd.loss.scratch import HeadGradient
from megatron_kd.mcore.mtp import MtpWeights, restore_acceptance, silence_acceptance
from megatron_kd.mcore.weight_grad import head_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCall:
    """One use of the output layer: what the loss needs, free of Megatron's types."""

    hidden_pbH: torch.Tensor
    """[p, b, H] this rank's positions: all t, or its part of them under sequence parallelism."""
    weight_VH: torch.Tensor
    """[V_padded/tp, H] the head's shard (the embedding's where tied)."""
    bias_V: torch.Tensor | None
    """[V_padded/tp], or None."""
    labels_bt: torch.Tensor
    """int64 [b, t]."""
    tp_group: torch.distributed.ProcessGroup
    """Ranks that hold the other shards."""
    is_sequence_parallel: bool
    """Whether p = t / tp."""
    dw: HeadGradient | None
    """Delivery of the weight gradient; None where no gradient is asked for."""
    transform: HeadTransform
    """Logit scale and soft-cap of this head."""
    mtp_weights_bt: torch.Tensor | None
    """[b, t] weights of a multi-token-prediction depth (cross-entropy only); None for the main head."""


Handler = Callable[[HeadCall, object], torch.Tensor]
"""(call, context) -> per-token loss [b, t] fp32, a fresh tensor: Megatron scales it in place."""


PLAIN_LAYERS = ("ColumnParallelLinear", "TEColumnParallelLinear")
"""Classes whose forward is hidden @ weight.T + bias and nothing else."""
CAPPED_LAYERS = ("Gemma2OutputLayer", "Gemma4OutputLayer")
"""Bridge's classes that also apply config.final_logit_softcapping."""


def head_transform(lm: torch.nn.Module) -> HeadTransform:
    """What this model applies to its logits. Errors: UnsupportedLayout for an output layer whose forward is not known here."""
    scale = float(getattr(lm.config, "mup_output_mult", 1.0)) if getattr(lm.config, "use_mup", False) else 1.0
    name = next(cls.__name__ for cls in type(lm.output_layer).__mro__ if "forward" in vars(cls))
    if name in PLAIN_LAYERS:
        return HeadTransform(scale=scale)
    if name in CAPPED_LAYERS and scale == 1.0:  # Megatron would scale capped logits, where HeadTransform caps scaled ones
        return HeadTransform(softcap=lm.config.final_logit_softcapping or None)
    raise UnsupportedLayout(rule("output_layer", name, "its forward may change the logits in a way that the loss would lose (quantised heads and adapters too)",
                                 f"Known are {', '.join(PLAIN_LAYERS + CAPPED_LAYERS)}"))


def check_output_layer(lm: torch.nn.Module) -> None:
    """UnsupportedLayout, by name, for an output layer that the fused loss cannot stand in for."""
    if (getattr(lm.output_layer, "gtp_remat_size", 1) or 1) > 1:
        raise UnsupportedLayout(rule("gtp_remat_size", lm.output_layer.gtp_remat_size, "the head is sharded again and gathered on use", "Turn it off for distillation"))
    if getattr(lm.config, "defer_embedding_wgrad_compute", False):
        raise UnsupportedLayout(rule("defer_embedding_wgrad_compute", True, "the head's weight gradient is formed in forward", "Turn it off for distillation"))
    head_transform(lm)


class OutputLayerHook:
    """Installed once on a language model that owns an output layer; does nothing until a context is bound with `bind`.

    `use_output_processor`: False takes the way in that models without megatron-core's official hook need.
    """

    def __init__(self, lm: torch.nn.Module, handler: Handler, *, use_output_processor: bool = True):
        check_output_layer(lm)
        self._lm, self._handler, self._context = lm, handler, None
        self._gradients: dict[int, HeadGradient] = {}
        self._deferred_weight = None
        self._is_official = use_output_processor and "output_processor" in inspect.signature(type(lm).forward).parameters
        self._has_mtp = bool(getattr(lm.config, "mtp_num_layers", None))
        lm.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        lm.register_forward_hook(self._after_forward, always_call=True)
        if hasattr(lm, "build_schedule_plan"):
            self._plan = lm.build_schedule_plan
            lm.build_schedule_plan = self._schedule_plan

    @contextmanager
    def bind(self, context: object):
        """Forwards inside this block run the handler with `context`; None leaves Megatron's own loss in place."""
        self._context = context
        try:
            yield
        finally:
            self._context = None

    def _before_forward(self, module, args, kwargs):
        if self._context is None:
            return None
        if self._has_mtp or not self._is_official:
            self._override_layer(kwargs)
        if self._is_official:
            kwargs = dict(kwargs, output_processor=self._process, output_processor_context=self._context)
        return args, kwargs

    def _after_forward(self, module, args, output):
        self._restore_layer()

    def _schedule_plan(self, *args, **kwargs):
        if self._context is not None:
            kwargs |= {"output_processor": self._process, "output_processor_context": self._context}
        return self._plan(*args, **kwargs)

    def _process(self, *, hidden_states, output_layer, output_weight, labels, context, **_):
        """megatron-core's output_processor: what it returns is the model's output."""
        self._restore_layer()
        output_layer.forward = lambda x, weight=None, **_: self._handle(x, weight, labels, context)
        try:
            return output_layer(hidden_states, weight=output_weight)
        finally:
            del output_layer.forward

    def _override_layer(self, kwargs) -> None:
        """For one forward: the layer passes hidden states through, and the loss function receives them as its "logits".

        On models with the official hook these are the MTP depths, which come before the main head; on others the main head. Megatron
        multiplies such "logits" by the muP output multiplier itself, which scales the logits that come of them alike.
        """
        context, depths = self._context, MtpWeights(self._lm, kwargs) if self._is_official else None

        def forward(x, weight=None, **_):
            self._deferred_weight = weight
            return x, None

        def loss(labels, hidden):
            weights = None if depths is None else depths.next(labels)
            return self._handle(hidden, self._deferred_weight, labels, context, mtp_weights_bt=weights, is_scaled=True)

        self._lm.output_layer.forward = forward
        self._lm.compute_language_model_loss = loss
        if depths is not None:
            silence_acceptance()

    def _restore_layer(self) -> None:
        restore_acceptance()
        vars(self._lm.output_layer).pop("forward", None)
        vars(self._lm).pop("compute_language_model_loss", None)
        self._deferred_weight = None

    def _handle(self, hidden_pbH, weight, labels_bt, context, *, mtp_weights_bt=None, is_scaled: bool = False) -> torch.Tensor:
        layer = self._lm.output_layer
        weight = layer.weight if weight is None else weight
        with_gradient = torch.is_grad_enabled() and weight.requires_grad
        transform = head_transform(self._lm)
        call = HeadCall(hidden_pbH=hidden_pbH, weight_VH=weight, bias_V=layer.bias, labels_bt=labels_bt, tp_group=layer.tp_group,
                        is_sequence_parallel=bool(layer.sequence_parallel) and layer.tp_group.size() > 1, dw=self._gradient_of(weight) if with_gradient else None,
                        transform=replace(transform, scale=1.0) if is_scaled else transform, mtp_weights_bt=mtp_weights_bt)
        return self._handler(call, context)

    def _gradient_of(self, weight) -> HeadGradient:
        if id(weight) not in self._gradients:
            embedding = getattr(getattr(self._lm, "embedding", None), "word_embeddings", None)
            self._gradients[id(weight)] = head_gradient(weight, also_embeds=embedding is not None and embedding.weight is weight)
        return self._gradients[id(weight)]
