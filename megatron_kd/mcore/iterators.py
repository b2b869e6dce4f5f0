"""Bridge's data iterators: where they are made, what is raw under them, how many micro-batches a step will read.

Owns the places at which `student/lookahead.py` is slid under Megatron. Bridge offers no hook between building its loaders and the first
step, so `intercept_iterators` stands in for one function for one call. Called by student/engine.py.
"""

import copy
from collections.abc import Callable, Iterator

Batch = dict


def intercept_iterators(receive: Callable[[object, object, object], None]) -> None:
    """Call `receive(train, valid, test)` with the RerunDataIterators (or None) that Bridge's setup() makes next, once."""
    import megatron.bridge.training.setup as setup

    original = getattr(setup.setup_data_iterators, "__wrapped__", setup.setup_data_iterators)

    def setup_data_iterators(*args, **kwargs):
        setup.setup_data_iterators = original
        iterators = original(*args, **kwargs)
        receive(*iterators)
        return iterators

    setup_data_iterators.__wrapped__ = original
    setup.setup_data_iterators = setup_data_iterators


def slide_under(rerun_iterator, make: Callable[[Iterator], Iterator]) -> Iterator:
    """Replace what a RerunDataIterator reads by `make(what it read)`, in place; returns the new iterator."""
    rerun_iterator.iterable = make(rerun_iterator.iterable)
    return rerun_iterator.iterable


def splitter(cfg) -> Callable[[Batch, int], list[Batch]] | None:
    """How a raw item becomes micro-batches: Bridge's split where items are global batches, None where they are micro-batches."""
    if cfg.dataset.dataloader_type != "batch":
        return None
    from megatron.bridge.data.batch_utils import split_batch_into_microbatches

    return split_batch_into_microbatches


def num_microbatches_at(consumed_samples: int) -> int:
    """Micro-batches of the training step that starts after `consumed_samples`, ramp-up included; the running calculator is not touched."""
    from megatron.core import num_microbatches_calculator as module

    calculator = copy.copy(module._GLOBAL_NUM_MICROBATCHES_CALCULATOR)
    calculator.update(consumed_samples, consistency_check=False, verbose=False)
    return calculator.get()


def num_microbatches_now() -> int:
    """Micro-batches of the training step that is running."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return get_num_microbatches()


def num_eval_microbatches(cfg, dp_size: int) -> int:
    """Micro-batches of one evaluation batch on one data-parallel rank."""
    batch = cfg.validation.eval_global_batch_size or cfg.train.global_batch_size
    return batch // ((cfg.validation.eval_micro_batch_size or cfg.train.micro_batch_size) * dp_size)


def current_microbatch(lm) -> int | None:
    """The micro-batch that the schedule says it runs, from the decoder's layers; None on a stage without one."""
    layers = getattr(lm.decoder, "layers", ())
    return getattr(layers[0], "current_microbatch", None) if len(layers) else None
