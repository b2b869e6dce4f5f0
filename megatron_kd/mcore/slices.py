"""Which positions of a full [b, s] micro-batch this context-parallel rank holds, as Megatron slices them.

Owns nothing: it applies Bridge's own slicing to a grid of row ids, so zigzag and packed partitions are whatever Megatron does.
Called by the student's step and the teacher's forward. Shape letters: b sequences, s positions, t local positions (s / cp).
"""

import torch
import torch.distributed as dist


def packed_params(cu_seqlens: torch.Tensor):
    """megatron-core's PackedSeqParams (THD) for int32 boundaries [documents + 1] without padding."""
    from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params

    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return get_packed_seq_params({"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_kv": longest})


def local_slice(fields: dict[str, torch.Tensor], cu_seqlens: torch.Tensor | None, cp_group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Each [b, s] tensor of `fields` cut to this rank's [b, t]. With one context-parallel rank they are returned as they are."""
    if cp_group.size() == 1:
        return dict(fields)
    if cu_seqlens is not None:
        from megatron.bridge.training.utils.packed_seq_utils import get_thd_cp_partition_indices

        some = next(iter(fields.values()))
        index_t = get_thd_cp_partition_indices(cu_seqlens, total_tokens=some.shape[1], cp_group=cp_group, device=some.device)
        return {name: value.index_select(1, index_t) for name, value in fields.items()}
    from megatron.core.utils import get_batch_on_this_cp_rank

    cut = get_batch_on_this_cp_rank(dict(fields), is_hybrid_cp=False, cp_group=cp_group)
    return {name: cut[name] for name in fields}


def row_id_grid(shape: tuple[int, int]) -> torch.Tensor:
    """int64 [b, s] of row ids, `sequence * s + position`."""
    return torch.arange(shape[0] * shape[1]).view(shape)
