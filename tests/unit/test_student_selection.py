"""Rows are picked, ordered, spread over sequence-parallel ranks and put back by global row id."""

import pytest
import torch

from megatron_kd.rows import RowBlock
from megatron_kd.student.loss import scatter
from megatron_kd.student.selection import RowSelection, align, select_all


def selection_of(mask) -> RowSelection:
    return select_all(torch.tensor(mask, dtype=torch.float32))


MASK = [[1.0, 0, 1, 1], [0, 0, 0.5, 1], [1, 1, 1, 0]]


def test_hidden_and_output_index_name_the_same_position():
    selection = selection_of(MASK)
    length, sequences = 4, 3
    hidden_tb = torch.arange(length * sequences).view(sequences, length).t().reshape(-1)  # value = row id, laid out [t, b]
    assert torch.equal(hidden_tb[selection.hidden_index_N], selection.row_ids_N)
    assert torch.equal(selection.output_index_N, selection.row_ids_N), "without context parallelism the [b, t] index is the row id"
    assert torch.equal(torch.tensor(MASK).reshape(-1)[selection.output_index_N], selection.weights_N)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_sequence_parallel_parts_join_to_the_whole(tp):
    selection = selection_of(MASK)
    part = selection.num_positions // tp
    joined = torch.cat([selection.of_rank(rank, tp) + rank * part for rank in range(tp)])
    assert torch.equal(joined, selection.hidden_index_N)
    assert selection.rows_per_rank(tp) == tuple(selection.of_rank(rank, tp).numel() for rank in range(tp))


def test_a_source_in_ascending_row_ids_is_brought_into_hidden_order():
    selection = selection_of(MASK)
    ids = selection.row_ids_N.sort().values
    rows = RowBlock(hidden_NH=ids[:, None].float(), row_ids_N=ids, hash=1)
    index = align(rows, selection.row_ids_N)
    assert torch.equal(rows.hidden_NH[index][:, 0].long(), selection.row_ids_N)


def test_a_source_with_more_rows_than_this_rank_needs_is_cut():
    selection = selection_of(MASK)
    rows = RowBlock(hidden_NH=torch.arange(12)[:, None].float(), row_ids_N=torch.arange(12), hash=1)
    assert torch.equal(rows.hidden_NH[align(rows, selection.row_ids_N)][:, 0].long(), selection.row_ids_N)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shares_of_a_source_one_after_the_other_are_the_selection(tp):
    selection = selection_of(MASK)
    shares = [selection.row_ids_of_rank(rank, tp) for rank in range(tp)]
    assert torch.equal(torch.cat(shares), selection.row_ids_N) and tuple(map(len, shares)) == selection.rows_per_rank(tp)
    for ids in shares:
        held = ids.sort().values
        rows = RowBlock(hidden_NH=held[:, None].float(), row_ids_N=held, hash=1, is_share=True)
        index = align(rows, ids)
        assert torch.equal(held if index is None else held[index], ids)


@pytest.mark.parametrize("ids", [[], [0, 2, 3], list(range(1, 13))])
def test_rows_of_another_micro_batch_are_noticed(ids):
    rows = RowBlock(hidden_NH=torch.zeros(len(ids), 1), row_ids_N=torch.tensor(ids, dtype=torch.int64), hash=1)
    with pytest.raises(AssertionError):
        align(rows, selection_of(MASK).row_ids_N)


def test_losses_return_to_their_places_with_their_gradient():
    selection = selection_of(MASK)
    loss_N = torch.arange(1.0, selection.row_ids_N.numel() + 1, requires_grad=True)
    out = scatter(loss_N, selection, torch.Size((3, 4)))
    assert torch.equal(out.reshape(-1)[selection.row_ids_N], loss_N) and out.count_nonzero() == loss_N.numel()
    weight = torch.rand(3, 4)
    (out * weight).sum().backward()
    assert torch.equal(loss_N.grad, weight.reshape(-1)[selection.row_ids_N])


def test_no_row_at_all():
    selection = selection_of([[0.0, 0], [0, 0]])
    assert selection.rows_per_rank(2) == (0, 0) and not selection.is_all
    assert scatter(torch.zeros(0, requires_grad=True), selection, torch.Size((2, 2))).requires_grad
    assert align(RowBlock(hidden_NH=torch.zeros(0, 1), row_ids_N=torch.zeros(0, dtype=torch.int64), hash=1), selection.row_ids_N) is None
