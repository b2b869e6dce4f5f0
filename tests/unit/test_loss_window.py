"""Window plans: every row once, bounded windows, the same collectives on every rank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.errors import ConfigError
from megatron_kd.loss.window import ROW_TILE, plan_windows


@settings(max_examples=200, deadline=None)
@given(num_rows=st.integers(0, 5000), window_rows=st.integers(1, 700))
def test_windows_cover_all_rows_once_in_order_and_stay_bounded(num_rows, window_rows):
    plan = plan_windows(num_rows, window_rows)
    bounds = [plan.bounds(w) for w in range(plan.num_windows)]
    assert [row for a, b in bounds for row in range(a, b)] == list(range(num_rows))
    assert all(0 < b - a <= window_rows for a, b in bounds)
    assert plan.num_windows == -(-num_rows // window_rows) or plan.step_rows % ROW_TILE == 0


@settings(max_examples=200, deadline=None)
@given(rows_per_rank=st.lists(st.integers(0, 300), min_size=1, max_size=6).map(tuple), window_rows=st.integers(1, 200))
def test_sequence_parallel_windows_cover_all_rows_once_and_share_every_rank_evenly(rows_per_rank, window_rows):
    plan = plan_windows(sum(rows_per_rank), window_rows, rows_per_rank)
    rows = [row for w in range(plan.num_windows) for a, b in plan.pieces(w) for row in range(a, b)]
    assert sorted(rows) == list(range(sum(rows_per_rank)))
    for w in range(plan.num_windows):
        assert plan.bounds(w)[1] - plan.bounds(w)[0] == sum(b - a for a, b in plan.pieces(w)) <= window_rows + len(rows_per_rank) - 1
        assert all(b - a <= plan.chunk_rows for a, b in plan.local_pieces(w))
    if plan.num_windows:
        assert plan.chunk_rows <= max(rows_per_rank) // plan.num_windows + 1


def test_balanced_windows_avoid_a_tiny_last_one():
    assert [plan_windows(2049, 2048).bounds(w) for w in range(2)] == [(0, 1152), (1152, 2049)]
    assert [plan_windows(9, 8).bounds(w) for w in range(2)] == [(0, 5), (5, 9)]


def test_no_rows_no_windows_on_any_rank():
    for rows_per_rank in (None, (0, 0)):
        plan = plan_windows(0, 8, rows_per_rank)
        assert (plan.num_windows, plan.max_rows, plan.chunk_rows if rows_per_rank else 0) == (0, 0, 0)


def test_bad_plans_are_refused():
    with pytest.raises(ConfigError, match="window_rows"):
        plan_windows(4, 0)
    with pytest.raises(ConfigError, match="rows_per_rank"):
        plan_windows(4, 2, (1, 2))
