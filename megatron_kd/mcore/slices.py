"""Which positions of a full [b, s] micro-batch this context-parallel rank holds, as Megatron slices them.

Zigzag slices are made by Megatron's own function, applied to a grid of row ids; packed ones by Transformer Engine's rule. Called by the student's step and the teacher's forward. Shape letters: b sequences, s positions, t local positions (s / cp).
"""

import torch
import torch.distributed as dist

from megatron_kd.errors import UnsupportedLayout, rule
from megatron_kd.mcore.transfer import to_device


def packed_params(cu_seqlens: torch.Tensor, device: torch.device):
    """megatron-core's PackedSeqParams (THD) on `device` for int32 boundaries [documents + 1] on the CPU, without padding."""
    from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params

    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    cu_seqlens = to_device(cu_seqlens, device)
    return get_packed_seq_params({"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_kv": longest})


def local_slice(fields: dict[str, torch.Tensor], cu_seqlens: torch.Tensor | None, cp_group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Each [b, s] tensor of `fields` cut to this rank's [b, t]. With one context-parallel rank they are returned as they are."""
    if cp_group.size() == 1:
        return dict(fields)
    if cu_seqlens is not None:
        index_t = packed_index(cu_seqlens, cp_group.rank(), cp_group.size())
        return {name: value.index_select(1, index_t) for name, value in fields.items()}
    from megatron.core.utils import get_batch_on_this_cp_rank

    cut = get_batch_on_this_cp_rank(dict(fields), is_hybrid_cp=False, cp_group=cp_group)
    return {name: cut[name] for name in fields}


def packed_index(cu_seqlens: torch.Tensor, cp_rank: int, cp_size: int) -> torch.Tensor:
    """int64 positions of a packed sequence that `cp_rank` holds: of each document's 2 x cp_size equal chunks the rank's and its mirror's.

    Megatron takes these indices from Transformer Engine (`thd_get_partitioned_indices`), which needs a GPU and would cost a sync here.
    Errors: UnsupportedLayout where a document does not divide, as Megatron demands.
    """
    bounds = cu_seqlens.tolist()
    parts = []
    for start, end in zip(bounds, bounds[1:]):
        if (end - start) % (2 * cp_size):
            raise UnsupportedLayout(rule("packed document", f"{end - start} tokens", f"must be a multiple of 2 x cp = {2 * cp_size}", "Pad documents when packing"))
        chunk = (end - start) // (2 * cp_size)
        parts += [torch.arange(start + i * chunk, start + (i + 1) * chunk) for i in (cp_rank, 2 * cp_size - 1 - cp_rank)]
    return torch.cat(parts)


def row_id_grid(shape: tuple[int, int]) -> torch.Tensor:
    """int64 [b, s] of row ids, `sequence * s + position`."""
    return torch.arange(shape[0] * shape[1]).view(shape)
