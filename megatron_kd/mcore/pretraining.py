"""Megatron-Bridge's training loop as this package calls it, and one evaluation outside of it.

Called by `megatron-kd train`. The CPU runtime must be installed first where there is no GPU.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_kd.vocab import VocabSpec


def pretrain(cfg, forward_step: Callable, callbacks: Sequence) -> None:
    """`megatron.bridge.training.pretrain.pretrain`, imported at the call."""
    from megatron.bridge.training import pretrain as bridge

    bridge.pretrain(cfg, forward_step, callbacks=list(callbacks))


class EvaluateFirst:
    """Callback: evaluates the untrained student once, before step 0, on the batches that a first evaluation reads.

    Bridge evaluates at intervals and after training only. The loaders are built a second time, so that neither the consumed-sample counters
    nor the iterators of the run are touched; every rank takes part.
    """

    def __init__(self, attached, callbacks: Sequence):
        """`attached` has `forward_step` and the context manager `evaluating(iterator)`, as attach() returns it."""
        self._attached, self._callbacks = attached, callbacks

    def on_train_start(self, context) -> None:
        """Runs the evaluation where the run starts at step 0."""
        state = context.state
        if state.train_state.step or not state.train_state.do_valid:
            return
        from megatron.bridge.training.callbacks import normalize_callbacks
        from megatron.bridge.training.eval import evaluate

        consumed = state.train_state.consumed_valid_samples
        iterator = _validation_iterator(state, context.model)
        with self._attached.evaluating(iterator), _whole_parameters(context.model, state.cfg):
            evaluate(
                state,
                self._attached.forward_step,
                iterator,
                context.model,
                None,
                state.cfg,
                callback_manager=normalize_callbacks(list(self._callbacks)),
            )
        state.train_state.consumed_valid_samples = consumed


@contextlib.contextmanager
def _whole_parameters(model, cfg):
    """The parameter all-gathers of `overlap_param_gather` stay off, as in Bridge's own evaluations: every rank holds all weights then."""
    from megatron.bridge.training import train as loop

    overlaps = loop.should_disable_forward_pre_hook(cfg.ddp.use_megatron_fsdp, cfg.optimizer.use_distributed_optimizer, cfg.ddp.overlap_param_gather)
    if overlaps:
        loop.disable_forward_pre_hook(model, param_sync=False)
    try:
        yield
    finally:
        if overlaps:
            loop.enable_forward_pre_hook(model)


def _validation_iterator(state, model):
    """A fresh iterator over the validation set, in the order of the run's own."""
    from megatron.bridge.data.loaders import RerunDataIterator, build_train_valid_test_data_loaders, cyclic_iter
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training.utils.pg_utils import get_pg_collection

    groups = get_pg_collection(model)
    provider = get_dataset_provider(state.cfg.dataset)
    known = {"tokenizer": state.tokenizer, "pg_collection": groups}
    wanted = {name: value for name, value in known.items() if name in inspect.signature(provider).parameters}
    _, loader, _ = build_train_valid_test_data_loaders(state.cfg, state.train_state, functools.partial(provider, **wanted), groups.dp)
    return RerunDataIterator(iter(cyclic_iter(loader)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShapes:
    """What the loss sees on the last pipeline stage."""

    width: int
    """Hidden size of the student."""
    vocab: VocabSpec
    """The student's vocabulary for both sides."""
    dtype: torch.dtype
    """Of hidden states and head."""
    tp_group: torch.distributed.ProcessGroup | None
    """Ranks that hold the shards; None for one."""


def head_shapes(model: Sequence[torch.nn.Module]) -> HeadShapes | None:
    """Of the chunk that owns the output layer; None on the other stages."""
    from megatron_kd.mcore.model import head_weight, language_model

    lm = language_model(model[-1])
    if not lm.post_process:
        return None
    weight, group = head_weight(lm), lm.pg_collection.tp
    tp = group.size()
    padded = weight.shape[0] * tp
    true_size = min(padded, getattr(lm.config, "vocab_size", None) or padded)
    return HeadShapes(
        width=weight.shape[1],
        vocab=VocabSpec(true_size=true_size, student_padded=padded, teacher_padded=true_size, tp=tp),
        dtype=weight.dtype,
        tp_group=group if tp > 1 else None,
    )
