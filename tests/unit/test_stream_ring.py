"""The ring's states and quarantine, and the health of a stream in numbers and words."""

import math

import pytest
import torch

from megatron_kd.errors import TeacherLost
from megatron_kd.stream.health import Counters, Interval, verdict
from megatron_kd.stream.loopback import Fabric, LoopbackInbox
from megatron_kd.stream.ring import Ring, State


@pytest.fixture
def ring():
    return Ring(LoopbackInbox(Fabric()), depth=2, slot_bytes=64, device=torch.device("cpu"))


def fill(ring, seq, parts=1):
    """All parts of `seq` land."""
    for rank in range(parts):
        last = ring.land(seq, rank, 1, parts)
    return last


def test_a_slot_goes_round_and_is_refused_while_in_use(ring):
    assert ring.post(0).index == 0 and ring.post(1).index == 1 and ring.post(2) is None
    assert not ring.land(0, 0, 3, 2) and ring.land(0, 5, 4, 2) and ring.slot_of(0).landed_rows == {0: 3, 5: 4}
    assert ring.hold(0).state is State.HELD and ring.post(2) is None
    ring.release(0)
    assert ring.post(2).index == 0 and ring.slot_of(2).landed_rows == {}
    assert (ring.count(State.POSTED), ring.count(State.READY)) == (2, 0)


@pytest.mark.parametrize("wrong", [lambda r: r.hold(0), lambda r: r.release(0), lambda r: r.hold(1), lambda r: r.release(7)])
def test_a_step_that_is_not_on_the_circle_is_our_own_bug(ring, wrong):
    ring.post(0)
    with pytest.raises(AssertionError, match="expected"):
        wrong(ring)


def test_revoked_memory_is_replaced_kept_and_freed_only_for_its_owner(ring):
    slot = ring.post(0)
    old, descriptor = slot.buffer, slot.descriptor
    ring.land(0, 0, 1, 2)
    assert ring.revoke(0, "A")
    assert slot.buffer.data_ptr() != old.data_ptr() and slot.descriptor != descriptor and slot.generation == 1 and slot.landed_rows == {}
    assert not ring.is_current(0, 0) and ring.is_current(0, 1), "a part about the old memory is late"
    assert ring.num_quarantined == 1 and ring.allocated_bytes == 3 * 64
    assert ring.absolve("B") == 0 and ring.absolve("A") == 1 and ring.allocated_bytes == 2 * 64


def test_a_slot_whose_parts_have_all_landed_is_not_revoked(ring):
    ring.post(0)
    fill(ring, 0, parts=3)
    assert not ring.revoke(0, "A") and ring.num_quarantined == 0 and ring.hold(0).generation == 0
    assert not ring.revoke(9, "A"), "a block that has no slot owes nothing"


def test_replicas_that_go_silent_without_end_are_named_before_memory_runs_out(ring):
    ring.post(0)
    for i in range(4):
        ring.revoke(0, f"replica{i}")
    with pytest.raises(TeacherLost, match="replica0.*replica3"):
        ring.revoke(0, "replica4")


def report(wait_s, busy_s, idle_s, alive, elapsed_s=10.0):
    counters = Counters()
    interval = Interval(counters)
    interval.report(100.0, depth=2, replicas_alive=alive, quarantined_slots=0)
    counters.wait_s, counters.teacher_busy_s, counters.teacher_idle_s, counters.blocks_taken, counters.ready_slot_sum, counters.bytes_received = wait_s, busy_s, idle_s, 10, 5, 4 * 10**9
    return interval.report(100.0 + elapsed_s, depth=2, replicas_alive=alive, quarantined_slots=3)


def test_numbers_of_an_interval_are_differences_over_its_time():
    metrics = report(3.1, 8.0, 2.0, 1)
    assert metrics["stream/wait_share"] == pytest.approx(0.31) and metrics["stream/occupancy"] == 0.25 and metrics["stream/gb_per_s"] == pytest.approx(0.4)
    assert metrics["stream/teacher_idle_share"] == pytest.approx(0.2) and metrics["stream/quarantined_slots"] == 3
    first = Interval(Counters()).report(1.0, depth=2, replicas_alive=1, quarantined_slots=0)
    assert math.isnan(first["stream/wait_share"]) and "first interval" in verdict(first)


@pytest.mark.parametrize("numbers,words", [
    ((3.1, 10, 0, 1), "waited 31% of the interval for 1 replica: 2 would do"),
    ((6.0, 40, 0, 4), "waited 60% of the interval for 4 replicas: 10 would do"),
    ((0.05, 5, 15, 4), "idle 75% of the time; 1 would do"),
    ((0.0, 9, 1, 2), "2 replicas idle 10% of the time"),
    ((0.0, 0, 0, 0), "no teacher replica is connected"),
])
def test_the_verdict_says_who_waits_and_how_many_would_do(numbers, words):
    assert words in verdict(report(*numbers))
