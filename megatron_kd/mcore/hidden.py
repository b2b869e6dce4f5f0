"""Last hidden states of a frozen Megatron model: after the final norm, before the head, logits never formed.

Owns the forward of one micro-batch and the forward-only pipeline schedule over several. Called by teacher/forward.py.
Shape letters: b sequences, t positions of this context-parallel rank, p positions that this rank holds (t / tp under sequence parallelism), H width.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_kd.errors import ConfigError, rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What one forward takes, on the model's device, already cut to this context-parallel rank."""

    tokens_bt: torch.Tensor
    """int64 token ids."""
    position_ids: torch.Tensor
    """int64 positions: [b, t], or all [b, s] where the model's rotary embedding cuts them itself (has_mrope, not packed)."""
    packed: object | None = None
    """megatron-core PackedSeqParams, or None."""


def has_mrope(lm: torch.nn.Module) -> bool:
    """Whether this model rotates by multimodal positions [3, b, s] (Qwen's vision-language models)."""
    return getattr(lm, "position_embedding_type", None) == "mrope"


def hidden_fwd(lm: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    """[p, b, H] on the last stage; on others the activations that the pipeline sends on. Call it under no_grad."""
    position_ids = inputs.position_ids
    if has_mrope(lm):  # text only: the three axes of multimodal rotary positions agree
        position_ids = position_ids.unsqueeze(0).expand(3, *position_ids.shape)
        if hasattr(lm.rotary_pos_emb, "is_thd_format"):  # the vision-language model around `lm` sets it before each forward
            lm.rotary_pos_emb.is_thd_format = inputs.packed is not None
    arguments = {"input_ids": inputs.tokens_bt, "position_ids": position_ids, "attention_mask": None, "packed_seq_params": inputs.packed}
    if not lm.post_process:
        return lm(**arguments)
    if "output_processor" in inspect.signature(type(lm).forward).parameters:
        return lm(**arguments, output_processor=lambda *, hidden_states, **_: hidden_states)
    lm.output_layer.forward = lambda x, **_: (x, None)  # models without the hook return their "logits" as [b, p, ...]
    try:
        return lm(**arguments).transpose(0, 1).contiguous()
    finally:
        del lm.output_layer.forward


def gather_sequence(lm: torch.nn.Module, hidden_pbH: torch.Tensor) -> torch.Tensor:
    """[t, b, H] on every tensor-parallel rank, whatever sequence parallelism split."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    return gather_from_sequence_parallel_region(hidden_pbH, group=lm.pg_collection.tp) if lm.config.sequence_parallel else hidden_pbH


def hidden_pipeline(lm: torch.nn.Module, batches: Sequence[Inputs]) -> list[torch.Tensor] | None:
    """`hidden_fwd` of every micro-batch through all pipeline stages; a list of [p, b, H] on the last stage, None on the others.

    Every rank of the model calls it with the same number and shapes of micro-batches (middle stages read only the shapes).
    """
    if lm.pg_collection.pp.size() == 1:
        return [hidden_fwd(lm, batch) for batch in batches]
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving

    shapes = {tuple(batch.tokens_bt.shape) for batch in batches}
    if len(shapes) != 1:
        raise ConfigError(rule("micro-batch shapes", sorted(shapes), "one forward-only schedule takes micro-batches of one shape", "Group them by shape"))
    (num_sequences, length), = shapes

    def step(iterator, module):
        return hidden_fwd(module, next(iterator)), lambda hidden, non_loss_data=True: hidden

    outputs = forward_backward_pipelining_without_interleaving(
        forward_step_func=step, data_iterator=iter(batches), model=lm, num_microbatches=len(batches), micro_batch_size=num_sequences,
        seq_length=length * lm.pg_collection.cp.size(), decoder_seq_length=length * lm.pg_collection.cp.size(), forward_only=True, collect_non_loss_data=True,
        p2p_communicator=P2PCommunicator(pp_group=lm.pg_collection.pp, config=lm.config), pg_collection=lm.pg_collection)
    return outputs if lm.post_process else None
