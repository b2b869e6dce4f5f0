"""Dump: a teacher's answers to many TokenBlocks into a cache, once for each segment.

Owns the plan (which blocks hold something that is not stored yet, and which data-parallel lane answers them), extraction, and writing
behind the next forward. Every rank of the teacher's world runs it with the same blocks; the plan is the same everywhere, so lanes
never store a segment twice and expert-parallel lanes always run together. Called by `megatron-kd cache build` and the cached source.
Shape letters: N rows, K kept tokens, H width.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist

from megatron_kd.cache.codec import TopKRows, encode_hidden, encode_topk
from megatron_kd.cache.key import SegmentKey
from megatron_kd.cache.manifest import Manifest
from megatron_kd.cache.segments import Segment, split
from megatron_kd.cache.spec import Collection, PayloadSpec
from megatron_kd.cache.writer import CacheWriter
from megatron_kd.loss.topk_extract import HeadShard, draw_extract, topk_extract
from megatron_kd.mcore.groups import Groups
from megatron_kd.mcore.model import head_weight
from megatron_kd.mcore.output_layer import head_transform
from megatron_kd.rows import RowBlock, TokenBlock, TopKBlock
from megatron_kd.teacher.forward import hidden_rows_many

MAX_WRITES_BEHIND = 4
Rows = RowBlock | TopKBlock


def head_shard(lm: torch.nn.Module, true_vocab: int) -> HeadShard:
    """The teacher's own shard of its head on this rank of the last stage."""
    weight, rank = head_weight(lm).detach(), lm.pg_collection.tp.rank()
    start = rank * weight.shape[0]
    bias = lm.output_layer.bias
    return HeadShard(weight, start, max(0, min(weight.shape[0], true_vocab - start)), None if bias is None else bias.detach(), head_transform(lm))


class Answers:
    """A frozen teacher model on this rank as a function from TokenBlock to what a cache stores."""

    def __init__(self, lm: torch.nn.Module, spec: PayloadSpec, window_rows: int = 256):
        self._lm, self._spec, self._window_rows = lm, spec, window_rows
        self._groups = Groups.of(lm.pg_collection)
        self._head = head_shard(lm, spec.vocab_size) if self._groups.is_last_stage and spec.kind != "hidden" else None

    @property
    def writes(self) -> bool:
        """Whether this rank gets whole answers: the first tensor- and context-parallel rank of the last stage."""
        return self._groups.is_last_stage and self._groups.tp.rank() == self._groups.cp.rank() == 0

    @property
    def depth(self) -> int:
        """Micro-batches that keep the teacher's pipeline full; 1 without one."""
        stages = self._groups.pp.size()
        return 2 * stages if stages > 1 else 1

    def __call__(self, block: TokenBlock) -> Rows | None:
        """`many` of one block."""
        (rows,) = self.many([block])
        return rows

    def many(self, blocks: Sequence[TokenBlock]) -> list[Rows | None]:
        """All asked rows of each block, on the CPU, on ranks of the last stage; None on other stages. Every rank of the teacher's model calls it.

        Neighbouring blocks of one shape go through the pipeline together.
        """
        answers = []
        for _, alike in itertools.groupby(blocks, key=lambda block: tuple(block.tokens_bs.shape)):
            alike = list(alike)
            rows = hidden_rows_many(self._lm, alike)
            answers += [None] * len(alike) if rows is None else [self._answer(block, row_block) for block, row_block in zip(alike, rows, strict=True)]
        return answers

    def _answer(self, block: TokenBlock, rows: RowBlock) -> Rows:
        if self._spec.kind == "hidden":
            parts = (rows.hidden_NH,)
        else:
            parts = self._kept(block, rows)
        row_ids_N, *parts = self._join(rows.row_ids_N, parts)
        common = {"row_ids_N": row_ids_N, "hash": block.hash}
        if self._spec.kind == "hidden":
            return RowBlock(hidden_NH=parts[0], **common)
        return TopKBlock(ids_NK=parts[0], log_probs_NK=parts[1], tail_N=parts[2], **common)

    def _kept(self, block: TokenBlock, rows: RowBlock):
        group = self._groups.tp if self._groups.tp.size() > 1 else None
        if self._spec.kind == "topk":
            return topk_extract(rows.hidden_NH, self._head, k=self._spec.width, group=group, window_rows=self._window_rows)
        uniforms = uniforms_of(block, rows.row_ids_N, self._spec.width)
        return draw_extract(rows.hidden_NH, self._head, uniforms, group=group, window_rows=self._window_rows)

    def _join(self, row_ids_N: torch.Tensor, parts) -> list[torch.Tensor]:
        """Row ids and parts of all context-parallel ranks, ascending in row id, on the CPU."""
        group = self._groups.cp
        if group.size() == 1:
            return [row_ids_N.cpu(), *(part.cpu() for part in parts)]
        device = parts[0].device
        count = torch.tensor([row_ids_N.numel()], device=device)
        counts = [torch.empty_like(count) for _ in range(group.size())]
        dist.all_gather(counts, count, group=group)
        sizes = [int(c) for c in counts]
        joined = [_gather_rows(tensor.to(device), sizes, group) for tensor in (row_ids_N, *parts)]
        order = joined[0].argsort()
        return [tensor[order].cpu() for tensor in joined]


def _gather_rows(tensor: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[:tensor.shape[0]] = tensor
    pieces = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(pieces, padded, group=group)
    return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])


def uniforms_of(block: TokenBlock, row_ids_N: torch.Tensor, num_draws: int) -> torch.Tensor:
    """float64 [N, D] in [0, 1) for the rows: seeded by segment key and position, so that draws do not depend on batch or layout."""
    uniforms_ND = torch.empty(len(row_ids_N), num_draws, dtype=torch.float64)
    for segment in split(block):
        inside = (row_ids_N >= segment.start) & (row_ids_N < segment.start + len(segment.ids_n))
        generator = torch.Generator().manual_seed(segment.key.low >> 1)
        drawn = torch.rand(len(segment.ids_n), num_draws, generator=generator, dtype=torch.float64)
        uniforms_ND[inside] = drawn[row_ids_N[inside] - segment.start]
    return uniforms_ND


class Plan:
    """Which segments of the blocks to come are to be answered, given what the store held when the plan was made."""

    def __init__(self, manifest: Manifest, collection: Collection):
        self._manifest, self._collection = manifest, collection
        self._planned: dict[SegmentKey, np.ndarray] = {}
        self.known_segments = self.known_rows = self.new_segments = self.new_rows = 0

    def need(self, block: TokenBlock) -> TokenBlock | None:
        """The block with its loss mask cut to the rows to be answered, earlier rows of the same segments included; None where all are stored."""
        mask = torch.zeros(block.tokens_bs.numel())
        for segment in split(block):
            rows = self._rows_to_answer(segment)
            if rows is not None:
                mask[torch.from_numpy(rows) + segment.start] = 1.0
        if not mask.any():
            return None
        return TokenBlock(tokens_bs=block.tokens_bs, loss_mask_bs=mask.view(block.tokens_bs.shape), position_ids_bs=block.position_ids_bs, cu_seqlens=block.cu_seqlens,
                          step=block.step, micro_batch=block.micro_batch, mode=block.mode, hash=block.hash)

    def _rows_to_answer(self, segment: Segment) -> np.ndarray | None:
        planned = self._planned.get(segment.key)
        if (planned is not None and np.isin(segment.asked, planned, assume_unique=True).all()) or self._manifest.find_covering(self._collection, segment) is not None:
            self.known_segments, self.known_rows = self.known_segments + 1, self.known_rows + len(segment.asked)
            return None
        stored = [self._manifest.load(location).rows for location in self._manifest.find(self._collection, segment.key)]
        rows = np.unique(np.concatenate([segment.asked, *stored, *([planned] if planned is not None else [])]))
        self._planned[segment.key] = rows
        self.new_segments, self.new_rows = self.new_segments + 1, self.new_rows + len(rows)
        return rows


def lanes(blocks: Iterable[TokenBlock], num_lanes: int, lane: int, depth: int = 1) -> Iterator[tuple[list[TokenBlock], int]]:
    """(`depth` blocks for this lane, how many of them count) for each round: the last round is filled up, so that all lanes run."""
    blocks = iter(blocks)
    while group := list(itertools.islice(blocks, num_lanes * depth)):
        num_real = len(range(lane, len(group), num_lanes))
        group += [group[0]] * (num_lanes * depth - len(group))
        yield group[lane::num_lanes], num_real


class Recorder:
    """Writes answers on a thread behind the next forward. Use with `with`; the writer is closed at the end."""

    def __init__(self, writer: CacheWriter, spec: PayloadSpec):
        self._writer, self._spec = writer, spec
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kd-dump")
        self._behind: list[Future] = []

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind, *_) -> None:
        self.close(finish=kind is None)

    def close(self, finish: bool = True) -> None:
        """Write what is pending (unless `finish` is false) and seal the open shard. Errors: those of the writer."""
        try:
            while self._behind and finish:
                self._behind.pop(0).result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._writer.close()

    @property
    def num_bytes(self) -> int:
        """Written so far."""
        return self._writer.num_bytes

    def put(self, block: TokenBlock, rows: Rows) -> None:
        """Store the rows of every segment of `block`; waits where writing is MAX_WRITES_BEHIND blocks behind. Errors: those of the writer."""
        rows.check(block, "the teacher")
        while len(self._behind) >= MAX_WRITES_BEHIND:
            self._behind.pop(0).result()
        self._behind.append(self._pool.submit(self._store, block, rows))

    def _store(self, block: TokenBlock, rows: Rows) -> None:
        start = 0
        for segment in split(block):
            own = slice(start, start + len(segment.asked))
            start = own.stop
            if self._writer.has(segment):
                continue
            if self._spec.kind == "hidden":
                payload, error = encode_hidden(rows.hidden_NH[own], self._spec)
            else:
                payload, error = encode_topk(TopKRows(rows.ids_NK[own], rows.log_probs_NK[own], rows.tail_N[own]), self._spec), 0.0
            self._writer.add(segment.key, segment.prefix, len(segment.ids_n), segment.asked, payload, error)
