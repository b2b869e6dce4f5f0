"""RowSelection: which positions of a micro-batch become rows of the loss on this rank, and where their losses go.

Owns the index arithmetic between the full [b, s] grid of row ids, this context-parallel rank's [b, t] labels and losses, and the flattened
[t, b] order of Megatron's hidden states. Computed on the CPU from the full loss mask, the same on every tensor-parallel rank, without a sync.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_kd.mcore.slices import local_slice, row_id_grid
from megatron_kd.rows import RowBlock, TokenBlock, TopKBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSelection:
    """Rows with loss mask other than 0, in the order of Megatron's flattened [t, b] hidden states."""

    hidden_index_N: torch.Tensor
    """int64 [N] into the flattened [t, b]."""
    output_index_N: torch.Tensor
    """int64 [N] into the flattened [b, t]."""
    row_ids_N: torch.Tensor
    """int64 [N] in the full [b, s]."""
    weights_N: torch.Tensor
    """float32 [N], the loss mask's values."""
    num_positions: int
    """b * t."""

    @property
    def is_all(self) -> bool:
        """Whether every position is a row, in order: nothing needs to be gathered."""
        return self.hidden_index_N.numel() == self.num_positions

    def rows_per_rank(self, tp_size: int) -> tuple[int, ...]:
        """Rows in each tensor-parallel rank's part of the sequence (sequence parallelism)."""
        part = self.num_positions // tp_size
        return tuple(torch.bincount(self.hidden_index_N // part, minlength=tp_size).tolist())

    def of_rank(self, tp_rank: int, tp_size: int) -> torch.Tensor:
        """int64 index of this rank's rows into its own flattened part [t / tp, b]."""
        part = self.num_positions // tp_size
        return self.hidden_index_N[self._of(tp_rank, part)] - tp_rank * part

    def row_ids_of_rank(self, tp_rank: int, tp_size: int) -> torch.Tensor:
        """int64 row ids of the rows in that rank's part of the sequence, in the selection's order."""
        return self.row_ids_N[self._of(tp_rank, self.num_positions // tp_size)]

    def _of(self, tp_rank: int, part: int) -> torch.Tensor:
        return (self.hidden_index_N >= tp_rank * part) & (self.hidden_index_N < (tp_rank + 1) * part)


def select_rows(block: TokenBlock, cp_group: dist.ProcessGroup) -> RowSelection:
    """The rows of `block` that this context-parallel rank holds."""
    cut = local_slice({"row_ids": row_id_grid(tuple(block.tokens_bs.shape)), "loss_mask": block.loss_mask_bs}, block.cu_seqlens, cp_group)
    return _selection(cut["row_ids"], cut["loss_mask"])


def select_all(mask_bt: torch.Tensor) -> RowSelection:
    """Rows of a local [b, t] weight grid (an MTP depth's shifted mask); row ids count within it."""
    return _selection(row_id_grid(tuple(mask_bt.shape)), mask_bt)


def _selection(row_ids_bt: torch.Tensor, mask_bt: torch.Tensor) -> RowSelection:
    num_sequences, length = mask_bt.shape
    mask = mask_bt.float().cpu().t().reshape(-1)
    index_N = mask.nonzero(as_tuple=True)[0]
    output_index_N = index_N % num_sequences * length + index_N // num_sequences
    return RowSelection(hidden_index_N=index_N, output_index_N=output_index_N, row_ids_N=row_ids_bt.cpu().t().reshape(-1)[index_N], weights_N=mask[index_N],
                        num_positions=mask.numel())


def align(rows: RowBlock | TopKBlock, row_ids_N: torch.Tensor) -> torch.Tensor | None:
    """int64 index [N] that brings a source's rows into the order of the selection's row_ids_N; None where they are in it already.

    The source may hold more rows than this rank needs (a whole micro-batch under context parallelism), never fewer.
    """
    if rows.row_ids_N.numel() == row_ids_N.numel() and torch.equal(rows.row_ids_N, row_ids_N):
        return None
    index_N = torch.searchsorted(rows.row_ids_N, row_ids_N)
    found = rows.row_ids_N[index_N.clamp(max=max(rows.row_ids_N.numel() - 1, 0))] if rows.row_ids_N.numel() else index_N
    assert torch.equal(found, row_ids_N), "a target source returned rows of another micro-batch"
    return index_N
