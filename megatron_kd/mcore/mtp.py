"""Multi-token prediction under the fused loss: the weights of each depth's rows, and upstream's acceptance counter while logits do not exist.

Owns what `process_mtp_loss` of megatron-core does to labels and loss mask between depths, repeated on weights alone. Called by output_layer.py.
Shape letters: b sequences, t positions of this context-parallel rank.
"""

import torch


class MtpWeights:
    """Weights [b, t] of one forward's MTP depths, in order: the loss mask that upstream multiplies each depth's loss with."""

    def __init__(self, lm: torch.nn.Module, forward_kwargs: dict):
        self._mask_bt, self._packed = forward_kwargs.get("loss_mask"), forward_kwargs.get("packed_seq_params")
        self._cp_group = lm.pg_collection.cp

    def next(self, labels_bt: torch.Tensor) -> torch.Tensor:
        """The next depth's weights; upstream counts every position where it is given no mask."""
        from megatron.core.transformer.multi_token_prediction import roll_tensor

        mask_bt = torch.ones_like(labels_bt) if self._mask_bt is None else self._mask_bt
        self._mask_bt, _ = roll_tensor(mask_bt, shifts=-1, dims=-1, cp_group=self._cp_group, packed_seq_params=self._packed)
        return self._mask_bt


def _not_measured(mtp_logits, mtp_labels, *_, **__) -> tuple[torch.Tensor, torch.Tensor]:
    """(NaN, 1): an acceptance rate needs the argmax over logits that were never formed, so the log shows nan instead of a made-up rate."""
    return torch.full((), float("nan"), device=mtp_labels.device), torch.ones((), device=mtp_labels.device)


def silence_acceptance() -> None:
    """Until `restore_acceptance`, MTP acceptance counts are not taken from what stands in for the logits."""
    from megatron.core.transformer import multi_token_prediction as upstream

    if upstream._compute_mtp_acceptance_counts is not _not_measured:
        _not_measured.upstream = upstream._compute_mtp_acceptance_counts
        upstream._compute_mtp_acceptance_counts = _not_measured


def restore_acceptance() -> None:
    """Put upstream's counter back; harmless when it is in place."""
    if hasattr(_not_measured, "upstream"):
        from megatron.core.transformer import multi_token_prediction as upstream

        upstream._compute_mtp_acceptance_counts = _not_measured.upstream
