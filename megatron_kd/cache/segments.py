"""Segments: the parts of a micro-batch that attention does not cross.

Owns the cut of a TokenBlock into what is stored and looked up: whole sequences, or packed documents. Called by the writer's and
the reader's callers. Shape letters: b sequences, s positions, n tokens of one segment, N rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_kd.cache.key import SegmentKey, prefix_hash, segment_key
from megatron_kd.errors import ConfigError, rule
from megatron_kd.rows import TokenBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One sequence or packed document of a micro-batch."""

    start: int
    """Row id of its first token: sequence_index * s + position."""
    ids_n: np.ndarray
    """int64 [n] token ids."""
    asked: np.ndarray
    """int64, ascending: positions within the segment whose loss mask is not 0."""
    key: SegmentKey
    """Of the ids."""

    @property
    def prefix(self) -> int:
        """See key.prefix_hash."""
        return prefix_hash(self.ids_n)

    def describe(self) -> str:
        """For errors: key, length, first ids."""
        return f"{self.key.hex()[:12]} ({len(self.ids_n)} tokens: {self.ids_n[:6].tolist()}...)"


def split(block: TokenBlock) -> Iterator[Segment]:
    """Segments of `block` in row order; those without an asked row are left out.

    A trailing run of one id (padding) is cut down to its first token before hashing where no row of the rest is asked, so that batches
    padded to another length still hit; causal attention makes all earlier rows independent of it.
    Errors: ConfigError where cu_seqlens do not fit the tokens.
    """
    num_sequences, length = block.tokens_bs.shape
    tokens = block.tokens_bs.detach().cpu().numpy()
    mask = block.loss_mask_bs.detach().cpu().numpy() != 0
    positions = None if block.position_ids_bs is None else block.position_ids_bs.detach().cpu().numpy()
    for sequence, start, end in _bounds(block, num_sequences, length):
        asked = np.flatnonzero(mask[sequence, start:end])
        if not asked.size:
            continue
        end = start + _unpadded(tokens[sequence, start:end], int(asked[-1]))
        ids = tokens[sequence, start:end].astype(np.int64)
        yield Segment(start=sequence * length + start, ids_n=ids, asked=asked,
                      key=segment_key(ids, None if positions is None else positions[sequence, start:end]))


def _bounds(block: TokenBlock, num_sequences: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(sequence, start, end) of each segment."""
    if block.cu_seqlens is None:
        yield from ((sequence, 0, length) for sequence in range(num_sequences))
        return
    bounds = block.cu_seqlens.tolist()
    if num_sequences != 1 or bounds[0] != 0 or bounds[-1] > length or any(a > b for a, b in zip(bounds, bounds[1:])):
        raise ConfigError(rule("cu_seqlens", bounds[:8], f"must ascend from 0 within one sequence of {length} tokens (b = {num_sequences})",
                               "Pack documents into b = 1"))
    bounds += [length] * (bounds[-1] < length)
    yield from ((0, a, b) for a, b in zip(bounds, bounds[1:]) if a < b)


def _unpadded(ids_n: np.ndarray, last_asked: int) -> int:
    """Tokens left after the trailing run of one id is cut to its first, or all where a row of the rest is asked."""
    others = np.flatnonzero(ids_n != ids_n[-1])
    kept = (int(others[-1]) + 1 if others.size else 0) + 1
    return kept if last_asked < kept else len(ids_n)
