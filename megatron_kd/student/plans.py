"""StepPlans: how many micro-batches each coming training step or evaluation batch will read, and where look-ahead must stop.

Pure arithmetic on Bridge's settings, the same on every rank. Called by the engine.
"""

from collections.abc import Callable, Iterator

from megatron_kd.student.lookahead import StepPlan


def train_plans(*, first_step: int, consumed_samples: int, train_iters: int, samples_per_microbatch: int, num_microbatches_at: Callable[[int], int],
                skipped: frozenset[int] = frozenset(), eval_interval: int | None = None) -> Iterator[StepPlan]:
    """Plans from `first_step` to the end of training.

    `samples_per_microbatch`: micro-batch size x data-parallel ranks. `num_microbatches_at(consumed)`: follows batch ramp-up. `skipped`: 1-based
    iterations that Bridge reads and drops (train.iterations_to_skip). `eval_interval`: an evaluation follows each multiple of it.
    """
    for step in range(first_step, train_iters):
        num = num_microbatches_at(consumed_samples)
        done = step + 1
        is_skipped = done in skipped
        evaluates = bool(eval_interval) and done % eval_interval == 0 and not is_skipped
        yield StepPlan(step=step, num_microbatches=num, is_skipped=is_skipped, pauses_after=evaluates or done == train_iters)
        consumed_samples += num * samples_per_microbatch


def eval_plans(*, first: int, iters: int, num_microbatches: int) -> list[StepPlan]:
    """Plans of one evaluation run; its batches are numbered from `first` on, over all evaluations of the process."""
    return [StepPlan(step=first + i, num_microbatches=num_microbatches, pauses_after=i == iters - 1) for i in range(iters)]
