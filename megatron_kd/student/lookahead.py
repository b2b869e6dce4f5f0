"""LookAhead: the student's data iterator, read k micro-batches early as TokenBlocks.

Owns reading ahead under everything that Megatron-Bridge does with the raw iterator: the split of a global batch into micro-batches
(`dataloader_type="batch"`), the per-chunk cache of VPP, skipped iterations, batch ramp-up. It changes no item and no order, holds no
collective, and answers `save_state` with the state of what the trainer has consumed, so a resumed run sees every item once.
Called by student/step.py (blocks of this step, blocks to ask for) and, through `__next__`, by the trainer. No Megatron imports.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_kd.errors import DataEnded, DataError, rule
from megatron_kd.rows import TokenBlock

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one training step, or one evaluation batch, will read."""

    step: int
    """TokenBlock.step of its micro-batches."""
    num_microbatches: int
    """Micro-batches on this data-parallel rank."""
    is_skipped: bool = False
    """Read and dropped by the trainer: never asked for."""
    pauses_after: bool = False
    """Do not look past its end before the next step begins (an evaluation, or the end of the run, comes between)."""


def block_of(batch: Batch, *, step: int, micro_batch: int, mode: Literal["train", "eval"]) -> TokenBlock:
    """TokenBlock of one loader micro-batch (`tokens` or `input_ids`; `loss_mask`, `position_ids`, `cu_seqlens*` where given)."""
    tokens = batch.get("tokens", batch.get("input_ids"))
    if tokens is None:
        raise DataError(rule("batch keys", sorted(batch), "must hold `tokens` or `input_ids`", "Use a dataset that yields Megatron batches"))
    mask = batch.get("loss_mask")
    mask = torch.ones(tokens.shape, dtype=torch.float32) if mask is None else mask.reshape(tokens.shape).float()
    positions = batch.get("position_ids")
    if positions is not None and torch.equal(positions, torch.arange(tokens.shape[1]).expand(tokens.shape)):
        positions = None
    return TokenBlock(tokens_bs=tokens, loss_mask_bs=mask, position_ids_bs=positions, cu_seqlens=_boundaries(batch), step=step, micro_batch=micro_batch, mode=mode)


def _boundaries(batch: Batch) -> torch.Tensor | None:
    """int32 [documents + 1] where the batch is packed; padding entries (-1) at the end cut off."""
    for name in ("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens"):
        value = batch.get(name)
        if value is not None:
            value = value.reshape(-1)
            return value[value >= 0].to(torch.int32)
    return None


class LookAhead:
    """Iterator over the raw loader's items, with the TokenBlocks of the items to come.

    `inner`: the raw iterator. `plans`: StepPlans in the order in which the trainer will read; may be endless. `split(item, n)`: the
    n micro-batches of one raw item where an item is a global batch, or None where an item is a micro-batch.
    """

    def __init__(self, inner: Iterator[Batch], *, plans: Iterable[StepPlan], mode: Literal["train", "eval"],
                 split: Callable[[Batch, int], list[Batch]] | None = None):
        self._inner, self._plans, self._mode, self._split = inner, iter(plans), mode, split
        self._saves_state = hasattr(inner, "save_state")
        self._items: deque[tuple[Batch, Any]] = deque()  # read, not yet consumed by the trainer, with the loader's state before each
        self._blocks: deque[TokenBlock] = deque()  # of steps that have not ended
        self._plan: StepPlan | None = None  # being filled by the items that are read
        self._filled = 0
        self._paused_step: int | None = None
        self._step = -1
        self._ended = False

    def __iter__(self):
        return self

    def __next__(self) -> Batch:
        if not self._items and not self._read():
            raise StopIteration
        return self._items.popleft()[0]

    def __getattr__(self, name: str):
        value = getattr(self._inner, name)  # Bridge asks whether a loader has `save_state`: this has it only where the loader does
        return self._state_of_consumed if name == "save_state" else value

    def _state_of_consumed(self):
        """The loader's state before the first item that the trainer has not consumed."""
        return self._items[0][1] if self._items else self._inner.save_state()

    def extend(self, plans: Iterable[StepPlan]) -> None:
        """Replace the plans to come (evaluation: each run adds its own)."""
        self._plans, self._ended = iter(plans), False

    def begin_step(self, step: int) -> None:
        """The trainer starts `step`: blocks of earlier steps are dropped, a pause before it is over."""
        self._step = step
        while self._blocks and self._blocks[0].step < step:
            self._blocks.popleft()
        if self._paused_step is not None and self._paused_step < step:
            self._paused_step = None

    def at(self, step: int, micro_batch: int) -> TokenBlock:
        """The block of one micro-batch of the current step, read from the loader if it was not yet. Errors: DataEnded, DataError."""
        while True:
            for block in self._blocks:
                if (block.step, block.micro_batch) == (step, micro_batch):
                    return block
            if self._blocks and (self._blocks[-1].step, self._blocks[-1].micro_batch) > (step, micro_batch):
                raise DataError(rule("micro-batch", (step, micro_batch), f"was not read in the planned order; blocks held are "
                                     f"{[(b.step, b.micro_batch) for b in self._blocks]}", "Micro-batches per step differ from the plan: report this"))
            if not self._read():
                raise DataEnded(rule("data iterator", f"{self._mode} step {step}, micro-batch {micro_batch}", "ended early", "Provide more data, or train fewer steps"))

    def upcoming(self, num_blocks: int) -> list[TokenBlock]:
        """Up to `num_blocks` blocks from the current step's first on, in order; fewer at a pause or where the data ends."""
        while len(self._blocks) < num_blocks and self._paused_step is None and self._read():
            pass
        return list(self._blocks)[:num_blocks]

    def _read(self) -> bool:
        """Read one raw item; False where the data has ended."""
        if self._ended:
            return False
        state = self._inner.save_state() if self._saves_state else None
        try:
            item = next(self._inner)
        except StopIteration:
            self._ended = True
            return False
        self._items.append((item, state))
        if self._plan is None or self._filled == self._plan.num_microbatches:
            self._plan, self._filled = next(self._plans, None), 0
        if self._plan is not None:
            self._append_blocks(item, self._plan)
        return True

    def _append_blocks(self, item: Batch, plan: StepPlan) -> None:
        parts = [item] if self._split is None else self._split(item, plan.num_microbatches)
        for part in parts:
            if not plan.is_skipped:
                self._blocks.append(block_of(part, step=plan.step, micro_batch=self._filled, mode=self._mode))
            self._filled += 1
        if plan.pauses_after and self._filled == plan.num_microbatches:
            self._paused_step = plan.step
