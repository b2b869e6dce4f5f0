"""hidden_rows: a frozen teacher's last hidden states for the rows that a TokenBlock asks for.

Owns the step from tokens to rows, free of where the teacher lives: the colocated source, the streamed server and the cache build call it.
Leaves out the head (the loss applies it), transport and storage. Logits never exist.
Shape letters: b sequences, s positions, t positions of this context-parallel rank, N rows, H width.
"""

from collections.abc import Sequence

import torch

from megatron_kd.mcore import hidden, slices
from megatron_kd.mcore.transfer import to_device
from megatron_kd.rows import RowBlock, TokenBlock


def hidden_rows(lm: torch.nn.Module, block: TokenBlock, *, gather: bool = True) -> RowBlock | None:
    """The asked rows of one micro-batch; see `hidden_rows_many`. Costs one forward of the model without its head."""
    rows = hidden_rows_many(lm, [block], gather=gather)
    return rows[0] if rows is not None else None


@torch.no_grad()
def hidden_rows_many(lm: torch.nn.Module, blocks: Sequence[TokenBlock], *, gather: bool = True) -> list[RowBlock] | None:
    """RowBlocks of micro-batches of one shape, in order, on the last pipeline stage; None on the other stages.

    `lm`: the unwrapped language model on this rank, frozen and in eval mode. Every rank of the teacher calls this with the same blocks.
    `gather`: each tensor-parallel rank returns all rows of its context-parallel rank; False leaves each with the rows that it computed
    (a slice of the sequence under sequence parallelism). `row_ids_N` always says which rows they are. Rows keep the model's dtype and device.
    """
    device = next(lm.parameters()).device
    batches = [_inputs(lm, block, device) for block in blocks]
    outputs = hidden.hidden_pipeline(lm, batches)
    if outputs is None:
        return None
    return [_select(lm, block, output, gather) for block, output in zip(blocks, outputs)]


def _inputs(lm: torch.nn.Module, block: TokenBlock, device: torch.device) -> hidden.Inputs:
    tokens = block.tokens_bs
    positions = block.position_ids_bs
    if positions is None:
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    cut = slices.local_slice({"tokens": tokens, "position_ids": positions}, block.cu_seqlens, lm.pg_collection.cp)
    if block.cu_seqlens is None and hidden.has_mrope(lm):
        cut["position_ids"] = positions  # multimodal rotary embeddings cut their angles themselves, unless documents are packed
    packed = None if block.cu_seqlens is None else slices.packed_params(block.cu_seqlens, device)
    return hidden.Inputs(tokens_bt=to_device(cut["tokens"], device, torch.int64), position_ids=to_device(cut["position_ids"], device, torch.int64), packed=packed)


def local_rows(lm: torch.nn.Module, block: TokenBlock, *, gathered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(index_N into the flattened [positions, b] of this rank's hidden states, row_ids_N), both ascending in row id, int64 on the CPU."""
    grid = slices.row_id_grid(tuple(block.tokens_bs.shape))
    cut = slices.local_slice({"row_ids": grid, "loss_mask": block.loss_mask_bs}, block.cu_seqlens, lm.pg_collection.cp)
    ids_pb, mask_pb = cut["row_ids"].t(), cut["loss_mask"].t()
    if lm.config.sequence_parallel and not gathered:
        rank, size = lm.pg_collection.tp.rank(), lm.pg_collection.tp.size()
        ids_pb, mask_pb = ids_pb.chunk(size)[rank], mask_pb.chunk(size)[rank]
    index_N = mask_pb.reshape(-1).nonzero(as_tuple=True)[0]
    row_ids_N = ids_pb.reshape(-1)[index_N]
    order = row_ids_N.argsort()
    return index_N[order], row_ids_N[order]


def _select(lm: torch.nn.Module, block: TokenBlock, hidden_pbH: torch.Tensor, gather: bool) -> RowBlock:
    if gather:
        hidden_pbH = hidden.gather_sequence(lm, hidden_pbH)
    index_N, row_ids_N = local_rows(lm, block, gathered=gather)
    flat = hidden_pbH.reshape(-1, hidden_pbH.shape[-1])
    all_rows = index_N.numel() == flat.shape[0] and bool((index_N == torch.arange(index_N.numel())).all())
    return RowBlock(hidden_NH=flat if all_rows else flat.index_select(0, to_device(index_N, flat.device)), row_ids_N=row_ids_N, hash=block.hash)
