"""What travels from the student to a teacher and back: TokenBlock, RowBlock, TopKBlock, and the hash that pairs them.

Shape letters: b sequences, s positions, N rows (positions whose loss mask is not 0), H hidden width, K kept tokens.
A row id is `sequence_index * s + position` in the micro-batch's full [b, s] grid, whatever CP, SP or packing does to it;
student and teacher rows are paired by it. Called by stream, cache, teacher and student. CPU tensors unless stated.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
import xxhash

from megatron_kd.errors import RowsMismatch, rule


def token_hash(tokens: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> int:
    """64-bit xxh3 of the ids as little-endian int64 with their shape, and of the packing boundaries where given."""
    digest = xxhash.xxh3_64()
    digest.update(repr(tuple(tokens.shape)).encode())
    digest.update(tokens.detach().to("cpu", torch.int64).contiguous().numpy().tobytes())
    if cu_seqlens is not None:
        digest.update(cu_seqlens.detach().to("cpu", torch.int64).contiguous().numpy().tobytes())
    return digest.intdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBlock:
    """One micro-batch as the student will train on it, with the full sequence (before any CP or SP slicing)."""

    tokens_bs: torch.Tensor
    """int64 [b, s] input ids."""
    loss_mask_bs: torch.Tensor
    """float32 [b, s]; 0 leaves the row out, any other value is the row's weight."""
    position_ids_bs: torch.Tensor | None = None
    """int64 [b, s]; None means 0..s-1 in each sequence."""
    cu_seqlens: torch.Tensor | None = None
    """int32 [documents + 1]: boundaries that attention does not cross (packed sequences, b == 1); None: one document a sequence."""
    step: int
    """Training step (Megatron's train_state.step when this micro-batch is consumed)."""
    micro_batch: int
    """Index within the step on this data-parallel rank."""
    mode: Literal["train", "eval"] = "train"
    """Which iterator it came from."""
    hash: int = field(default=0)
    """token_hash of the ids; computed when 0."""

    def __post_init__(self):
        if self.hash == 0:
            object.__setattr__(self, "hash", token_hash(self.tokens_bs, self.cu_seqlens))

    @property
    def row_ids_N(self) -> torch.Tensor:
        """int64 [N] ascending row ids whose loss mask is not 0."""
        return self.loss_mask_bs.reshape(-1).nonzero(as_tuple=True)[0]

    @property
    def key(self) -> tuple[str, int, int]:
        """(mode, step, micro_batch): the order in which the student consumes."""
        return self.mode, self.step, self.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Teacher hidden states after the final norm, before the head, for the asked rows."""

    hidden_NH: torch.Tensor
    """bfloat16 (float32 only on the colocated CPU path) [N, H_t], on the student's device or its host."""
    row_ids_N: torch.Tensor
    """int64 [N] ascending row ids."""
    hash: int
    """The TokenBlock's hash."""
    is_share: bool = False
    """Only the rows of this tensor-parallel rank's part of the sequence (sequence parallelism): the loss gathers them window by window."""

    def check(self, block: TokenBlock, source: str) -> None:
        """RowsMismatch unless these are the rows of `block`; `source` names the replica or cache."""
        _check_rows(self.row_ids_N, self.hash, self.hidden_NH.shape[0], block, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKBlock:
    """The teacher's kept tokens per asked row, at temperature 1."""

    ids_NK: torch.Tensor
    """int64 [N, K] token ids below 2^32, distinct within a row."""
    log_probs_NK: torch.Tensor
    """float32 [N, K] natural logarithms of the teacher's probabilities."""
    tail_N: torch.Tensor
    """float32 [N] probability mass outside the kept tokens, summed over those columns, never 1 - sum."""
    row_ids_N: torch.Tensor
    """int64 [N] ascending row ids."""
    hash: int
    """The TokenBlock's hash."""

    def check(self, block: TokenBlock, source: str) -> None:
        """RowsMismatch unless these are the rows of `block`; `source` names the cache."""
        _check_rows(self.row_ids_N, self.hash, self.ids_NK.shape[0], block, source)


def _check_rows(row_ids_N: torch.Tensor, hash_: int, num_rows: int, block: TokenBlock, source: str) -> None:
    if hash_ != block.hash:
        raise RowsMismatch(rule(f"token hash from {source}", f"{hash_:#x}", f"must be that of micro-batch {block.key}, {block.hash:#x}",
                                "Teacher and student do not see the same tokens: check tokenizer, packing and data order"))
    want = block.row_ids_N
    if num_rows != want.numel() or not torch.equal(row_ids_N.cpu(), want):
        raise RowsMismatch(rule(f"rows from {source}", num_rows, f"must be the {want.numel()} rows of micro-batch {block.key} whose loss mask is not 0",
                                "The answer belongs to another loss mask: ask again with this one"))
