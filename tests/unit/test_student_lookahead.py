"""Look-ahead changes neither items nor order, keys every micro-batch, pauses where it must, and saves the state of what was consumed."""

import itertools

import pytest
import torch

from megatron_kd.errors import DataEnded, DataError
from megatron_kd.student.lookahead import LookAhead, StepPlan, block_of
from megatron_kd.student.plans import eval_plans, train_plans


class Loader:
    """Raw iterator of numbered items with a saved state, like Energon's."""

    def __init__(self, num_items, sequences=1):
        self.next_item, self.num_items, self.sequences = 0, num_items, sequences

    def __iter__(self):
        return self

    def __next__(self):
        if self.next_item == self.num_items:
            raise StopIteration
        self.next_item += 1
        return {"tokens": torch.full((self.sequences, 4), self.next_item - 1), "loss_mask": torch.ones(self.sequences, 4), "position_ids": torch.arange(4).expand(self.sequences, 4)}

    def save_state(self):
        return self.next_item


def plans(*counts, **settings):
    return [StepPlan(step=i, num_microbatches=n, **settings) for i, n in enumerate(counts)]


def numbers(blocks):
    return [int(block.tokens_bs[0, 0]) for block in blocks]


def test_items_pass_unchanged_whatever_was_read_ahead():
    ahead = LookAhead(Loader(9), plans=plans(3, 3, 3), mode="train")
    seen = []
    for step in range(3):
        ahead.begin_step(step)
        for index in range(3):
            assert numbers(ahead.upcoming(index + 3)) == list(range(3 * step, min(3 * step + index + 3, 9)))
            seen.append(int(next(ahead)["tokens"][0, 0]))
            block = ahead.at(step, index)
            assert (block.step, block.micro_batch, int(block.tokens_bs[0, 0])) == (step, index, 3 * step + index)
    assert seen == list(range(9))


def test_saved_state_is_that_of_the_consumed_items():
    ahead = LookAhead(Loader(9), plans=plans(9), mode="train")
    ahead.begin_step(0)
    next(ahead), next(ahead)
    ahead.upcoming(7)
    assert ahead.save_state() == 2, "a resumed loader would lose the items that were only read ahead"
    next(ahead)
    assert ahead.save_state() == 3


def test_a_loader_without_a_state_does_not_seem_to_have_one():
    assert not hasattr(LookAhead(iter([]), plans=(), mode="train"), "save_state")


def test_no_block_past_a_pause_until_the_next_step():
    first, second = StepPlan(step=0, num_microbatches=2, pauses_after=True), StepPlan(step=1, num_microbatches=2)
    ahead = LookAhead(Loader(4), plans=[first, second], mode="train")
    ahead.begin_step(0)
    assert numbers(ahead.upcoming(4)) == [0, 1], "slots of a later step must not be held through an evaluation"
    ahead.begin_step(1)
    assert numbers(ahead.upcoming(4)) == [2, 3]


def test_global_batches_are_split_as_the_trainer_splits_them():
    def split(item, num):
        return [{name: part for name, part in zip(item, parts)} for parts in zip(*(value.tensor_split(num) for value in item.values()))]

    ahead = LookAhead(Loader(2, sequences=4), plans=plans(2, 2), mode="train", split=split)
    ahead.begin_step(0)
    blocks = ahead.upcoming(4)
    assert [(block.step, block.micro_batch, tuple(block.tokens_bs.shape)) for block in blocks] == [(0, 0, (2, 4)), (0, 1, (2, 4)), (1, 0, (2, 4)), (1, 1, (2, 4))]
    assert next(ahead)["tokens"].shape == (4, 4)


def test_skipped_iterations_are_read_but_never_asked_for():
    ahead = LookAhead(Loader(6), plans=[StepPlan(step=0, num_microbatches=2), StepPlan(step=1, num_microbatches=2, is_skipped=True), StepPlan(step=2, num_microbatches=2)],
                      mode="train")
    ahead.begin_step(0)
    assert numbers(ahead.upcoming(6)) == [0, 1, 4, 5]
    assert [int(next(ahead)["tokens"][0, 0]) for _ in range(6)] == list(range(6))


def test_early_end_names_step_and_micro_batch():
    ahead = LookAhead(Loader(3), plans=plans(2, 2), mode="train")
    ahead.begin_step(1)
    with pytest.raises(DataEnded, match="train step 1, micro-batch 1"):
        ahead.at(1, 1)


def test_a_micro_batch_out_of_the_planned_order_is_an_error():
    ahead = LookAhead(Loader(4), plans=plans(2, 2), mode="train")
    ahead.begin_step(0)
    ahead.upcoming(4)
    with pytest.raises(DataError, match="planned order"):
        ahead.at(0, 2)


def test_items_beyond_the_plan_have_no_block():
    ahead = LookAhead(Loader(3), plans=plans(1), mode="eval")
    ahead.begin_step(0)
    assert numbers(ahead.upcoming(9)) == [0]
    assert len(list(ahead)) == 3


def test_packed_boundaries_and_positions_reach_the_block():
    batch = {"tokens": torch.arange(8)[None], "cu_seqlens": torch.tensor([[0, 3, 8, -1, -1]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    block = block_of(batch, step=0, micro_batch=0, mode="train")
    assert block.cu_seqlens.tolist() == [0, 3, 8] and block.position_ids_bs is not None and bool((block.loss_mask_bs == 1).all())
    assert block_of({"tokens": torch.arange(4)[None], "position_ids": torch.arange(4)[None]}, step=0, micro_batch=0, mode="train").position_ids_bs is None


def test_train_plans_follow_ramp_up_skips_and_evaluations():
    ramp = lambda consumed: 1 if consumed < 8 else 2  # noqa: E731
    made = list(train_plans(first_step=2, consumed_samples=4, train_iters=8, samples_per_microbatch=2, num_microbatches_at=ramp, skipped=frozenset({4}), eval_interval=3))
    assert [plan.step for plan in made] == [2, 3, 4, 5, 6, 7]
    assert [plan.num_microbatches for plan in made] == [1, 1, 2, 2, 2, 2]
    assert [plan.step for plan in made if plan.is_skipped] == [3], "Bridge counts iterations_to_skip from 1"
    assert [plan.step for plan in made if plan.pauses_after] == [2, 5, 7]


def test_eval_plans_number_batches_over_all_evaluations():
    first, second = eval_plans(first=0, iters=2, num_microbatches=3), eval_plans(first=2, iters=2, num_microbatches=3)
    assert [plan.step for plan in itertools.chain(first, second)] == [0, 1, 2, 3]
    assert [plan.pauses_after for plan in first] == [False, True]
