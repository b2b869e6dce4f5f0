"""The route: every row once, to the rank that owns it, from a rank that holds it."""

import numpy as np
import pytest

from megatron_kd.errors import UnsupportedLayout
from megatron_kd.stream.route import RoutePlan, Side, owners
from megatron_kd.stream.sizes import slot_rows

# tp splits with remainder, cp both orders, SP on both; 1:1 as the base, N:1 and 1:N for fan-in and fan-out
LAYOUTS = [
    (Side(), Side()),
    (Side(tp=3), Side(tp=2, sequence_parallel=True)),
    (Side(tp=2, cp=2), Side()),
    (Side(), Side(tp=2, cp=2, sequence_parallel=True)),
    (Side(tp=2, sequence_parallel=True), Side(tp=3)),
    (Side(tp=3, cp=2, sequence_parallel=True), Side(tp=2, cp=3, cp_order="contiguous", sequence_parallel=True)),
    (Side(tp=2, cp=2), Side(tp=2, cp=3, cp_order="contiguous", sequence_parallel=True)),
    (Side(cp=2, cp_order="contiguous"), Side(cp=2)),
]


def masks(b, s):
    generator = np.random.default_rng(5)
    return {"random": generator.random(b * s) < 0.6, "all": np.ones(b * s, bool), "none": np.zeros(b * s, bool), "one": np.arange(b * s) == 17,
            "tail": np.arange(b * s) % s >= s - 5}


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("student,teacher", LAYOUTS)
def test_every_row_arrives_once_where_it_is_owned_from_where_it_is_held(student, teacher, spread):
    b, s = 2, 24
    plan = RoutePlan(student=student, teacher=teacher, spread=spread)
    student_owner, teacher_owner = owners(s, student.cp, student.cp_order), owners(s, teacher.cp, teacher.cp_order)
    for mask in masks(b, s).values():
        row_ids = np.flatnonzero(mask)
        received = plan.received(row_ids, s)
        slots = [np.full(len(r), -1) for r in received]
        for part in plan.parts(row_ids, s):
            assert np.all(slots[part.student_rank][part.slot_row_P] == -1), "a row is sent twice"
            slots[part.student_rank][part.slot_row_P] = row_ids[part.index_P]
            rebuilt = np.concatenate([np.arange(dst, dst + n) for _, dst, n in part.runs])
            assert np.array_equal(rebuilt, part.slot_row_P)
            position = row_ids[part.index_P] % s
            cp_rank, tp_rank = divmod(part.teacher_rank, teacher.tp)
            assert np.all(teacher_owner[position] == cp_rank)
            if teacher.sequence_parallel:
                local = np.flatnonzero(teacher_owner == cp_rank)
                held = local.reshape(teacher.tp, -1)[tp_rank]
                assert np.isin(position, held).all()
        for rank, (rows, slot) in enumerate(zip(received, slots)):
            assert np.array_equal(slot, row_ids[rows]) and np.all(np.diff(slot) > 0)
            assert np.all(student_owner[slot % s] == rank // student.tp)
            assert len(slot) <= plan.slot_rows(b, s) == slot_rows(b, s, tp=student.tp, cp=student.cp, spread=spread)
        for cp_rank in range(student.cp):
            group = slots[cp_rank * student.tp:(cp_rank + 1) * student.tp]
            want = row_ids[student_owner[row_ids % s] == cp_rank]
            for got in ([np.sort(np.concatenate(group))] if spread else group):
                assert np.array_equal(got, want)
            if spread and student.sequence_parallel:
                parts = np.flatnonzero(student_owner == cp_rank).reshape(student.tp, -1)
                assert all(np.isin(slot % s, part).all() for slot, part in zip(group, parts, strict=True)), "a row is not where its position is"


def test_zigzag_gives_first_and_last_chunk_to_rank_0_and_contiguous_gives_halves():
    assert owners(8, 2, "zigzag").tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert owners(8, 2, "contiguous").tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_packed_documents_are_dealt_one_by_one():
    assert owners(12, 2, "zigzag", np.array([0, 4, 12])).tolist() == [0, 1, 1, 0] + [0, 0, 1, 1, 1, 1, 0, 0]
    plan = RoutePlan(student=Side(cp=2), teacher=Side())
    assert [r.tolist() for r in plan.received(np.arange(12), 12, np.array([0, 4, 12]))] == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]


def test_sending_is_shared_among_teacher_ranks_that_hold_the_same_rows():
    parts = RoutePlan(student=Side(), teacher=Side(tp=4)).parts(np.arange(16), 16)
    assert [(p.teacher_rank, len(p.index_P)) for p in parts] == [(0, 4), (1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize("call", [
    lambda: owners(10, 2, "zigzag"),
    lambda: owners(12, 2, "zigzag", np.array([0, 6, 12])),
    lambda: owners(12, 2, "zigzag", np.array([0, 4, 8])),
    lambda: RoutePlan(student=Side(), teacher=Side(tp=3, sequence_parallel=True)).parts(np.arange(8), 8),
    lambda: Side(tp=0),
])
def test_what_does_not_divide_is_refused_by_name(call):
    with pytest.raises(UnsupportedLayout, match="must|at least"):
        call()
