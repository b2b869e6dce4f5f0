"""CachedSource: stored teacher rows behind the interface of student/targets.py, read ahead by threads.

Owns what happens on a miss: `fail` ends the run with an explanation; `ce_only` leaves the missing rows without a KD term; `build` runs the
teacher beside the student for that micro-batch and stores its answer. Each rank of the last stage reads for itself (local shards
share the page cache); there is no collective unless a miss has to be agreed on.
"""

import logging
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import torch
import torch.distributed as dist

from megatron_kd.cache.reader import BlockRead, CacheReader
from megatron_kd.cache.spec import PayloadSpec
from megatron_kd.cache.writer import CacheWriter
from megatron_kd.config.schema import LossConfig
from megatron_kd.errors import CacheError, UnsupportedLayout, rule
from megatron_kd.mcore import model as models
from megatron_kd.mcore.groups import Groups, layout_of
from megatron_kd.rows import RowBlock, TokenBlock, TopKBlock
from megatron_kd.student.targets import SourceRequest, Targets, head_from_checkpoint
from megatron_kd.teacher.cache_of import collection_of, storage_of
from megatron_kd.teacher.dump import Answers, Recorder

logger = logging.getLogger(__name__)
DEADLINE_S = 300.0
BUILD_COMMAND = "megatron-kd cache build RECIPE"


class CachedSource:
    """TargetSource over a CacheReader."""

    def __init__(self, reader: CacheReader, *, on_miss: str, groups: Groups, rows_may_lack_mass: bool, builder: "Builder | None" = None):
        """`rows_may_lack_mass`: the objective gives rows without teacher mass loss 0 and gradient 0, so ce_only can leave out single rows."""
        self._reader, self._on_miss, self._groups, self._rows_may_lack_mass, self._builder = reader, on_miss, groups, rows_may_lack_mass, builder
        self._reads: dict[tuple, Future] = {}
        self._reset()

    def _reset(self) -> None:
        self._num_rows = self._num_missing = 0
        self._wait_s = self._kept = 0.0
        self._read_before = self._reader.num_bytes_read

    def post(self, block: TokenBlock) -> None:
        """Start reading."""
        self._reads[block.key] = self._reader.submit(block)

    def take(self, block: TokenBlock) -> RowBlock | TopKBlock | None:
        """The rows on the CPU. Errors: CacheMiss naming segment, explanation and what to run; CacheCorrupt; CacheError after DEADLINE_S."""
        started = time.perf_counter()
        try:
            read = self._reads.pop(block.key).result(DEADLINE_S)
        except FutureTimeout as e:
            raise CacheError(rule(f"reading micro-batch {block.key}", f"{DEADLINE_S:g} s", "the store does not answer", "Check the file system or object store")) from e
        self._wait_s += time.perf_counter() - started
        rows = self._handle_miss(block, read)
        if rows is not None:
            self._num_rows += rows.row_ids_N.numel()
            self._kept += float((1.0 - rows.tail_N).sum()) if isinstance(rows, TopKBlock) else rows.row_ids_N.numel()
        return rows

    def release(self, block: TokenBlock) -> None:
        """Nothing is held."""

    def metrics(self) -> dict[str, float]:
        """Since the last call: rows, rows that were not stored, seconds waited for the reader, bytes read, mean teacher mass on the kept tokens."""
        rows = max(self._num_rows, 1)
        numbers = {"cache/rows": float(self._num_rows), "cache/missing_rows": float(self._num_missing), "cache/wait_s": self._wait_s,
                   "cache/bytes": float(self._reader.num_bytes_read - self._read_before), "cache/teacher_mass_kept": self._kept / rows}
        self._reset()
        return numbers

    def close(self) -> None:
        """End the threads; seal what was built."""
        for future in self._reads.values():
            future.cancel()
        self._reads.clear()
        self._reader.close()
        if self._builder is not None:
            self._builder.close()
            self._builder = None

    def _handle_miss(self, block: TokenBlock, read: BlockRead) -> RowBlock | TopKBlock | None:
        missing = bool(read.missing)
        if missing and self._on_miss == "fail":
            raise self._reader.miss_error(read.missing, block, BUILD_COMMAND)
        if self._on_miss == "build":
            agreed = self._agree(missing, (self._groups.tp, self._groups.cp))
            self._num_missing += int(read.missing_N.sum())
            return self._builder.build(block) if agreed else read.rows
        if self._on_miss == "ce_only":
            self._num_missing += int(read.missing_N.sum())
            if missing:
                logger.warning("%s", self._reader.miss_error(read.missing, block, BUILD_COMMAND))
            if not self._rows_may_lack_mass and self._agree(missing, (self._groups.tp, self._groups.dp_cp)):
                return None
        return read.rows

    @staticmethod
    def _agree(flag: bool, groups) -> bool:
        """Whether any rank of `groups` says so."""
        said = torch.tensor([int(flag)], dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
        for group in groups:
            dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
        return bool(said.item())


class Builder:
    """on_miss: build. The teacher beside the student; what it answers is stored for the next time."""

    def __init__(self, answers: Answers, recorder: Recorder | None):
        self._answers, self._recorder = answers, recorder

    def build(self, block: TokenBlock) -> RowBlock | TopKBlock:
        """The teacher's answer to `block`. Collective over tensor and context parallelism."""
        rows = self._answers(block)
        if self._recorder is not None:
            self._recorder.put(block, rows)
        return rows

    def close(self) -> None:
        """Seal what was stored."""
        if self._recorder is not None:
            self._recorder.close()


def rows_may_lack_mass(spec: PayloadSpec, loss: LossConfig) -> bool:
    """Whether a row with probability 0 everywhere has KD 0 and no KD gradient: forward KL sums p log(p / q)."""
    return spec.kind != "hidden" and loss.divergence == "forward_kl" and loss.top_k_mode != "renormalise"


def cached_targets(request: SourceRequest) -> Targets:
    """Open the store for this teacher, payload and vocabulary. Every rank of the student calls it."""
    cache, groups = request.cache, request.groups
    collection = collection_of(cache, teacher_dir=request.teacher.model, true_vocab=request.vocab.true_size)
    storage = storage_of(cache, request.output_dir)
    builder = _builder(request, storage, collection) if cache.on_miss == "build" else None
    reader = CacheReader(storage, collection, num_threads=cache.readers)
    head = None
    if collection.spec.kind == "hidden" and groups.is_last_stage:
        head = head_from_checkpoint(request.teacher.model, request.vocab, groups.tp.rank(), dtype=request.dtype, device=request.device)
    source = CachedSource(reader, on_miss=cache.on_miss, groups=groups, rows_may_lack_mass=rows_may_lack_mass(collection.spec, request.loss), builder=builder)
    return Targets(source=source, head=head, name=f"the cache {storage.location}", ahead=cache.prefetch)


def _builder(request: SourceRequest, storage, collection) -> Builder:
    layout = layout_of(request.student_lm.config)
    if layout.pp > 1 or layout.ep > 1:
        raise UnsupportedLayout(rule("cache.on_miss", "build", f"a missing micro-batch is one rank group's affair, which pp = {layout.pp}, ep = {layout.ep} does not allow",
                                     "Run `megatron-kd cache build RECIPE` first, or set cache.on_miss=ce_only"))
    provider = models.teacher_provider(request.teacher.model, layout=layout, dtype=request.dtype, seq_length=request.seq_length)
    (chunk,) = models.build_model(provider)
    answers = Answers(models.language_model(chunk), collection.spec)
    recorder = None
    if answers.writes:
        writer = CacheWriter(storage, collection, shard_bytes=request.cache.shard_bytes)
        recorder = Recorder(writer, collection.spec)
    return Builder(answers, recorder)
