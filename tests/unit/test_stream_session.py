"""The stream on threads and loopback: order, layouts, losses of replicas, refusals, hostile peers."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from megatron_kd.errors import FingerprintMismatch, RowsMismatch, TeacherError, TeacherLost, TeacherStalled, TransferFailed, UnsupportedLayout
from megatron_kd.stream import sizes
from megatron_kd.stream.loopback import Fabric, LoopbackInbox
from megatron_kd.stream.receiver import Receiver
from megatron_kd.stream.rendezvous import Hub
from megatron_kd.stream.route import Side
from megatron_kd.stream.writer import Writer
from tests.stream_peers import AGREED, HIDDEN, TOKEN, Stage, ThreadTeacher, block, check_rows, rows_of, student_spec


def consume(receiver, blocks, ahead=3):
    """Post `ahead` ahead, take and check all, in order."""
    for i in range(len(blocks) + ahead):
        if i < len(blocks):
            receiver.post(blocks[i])
        if i >= ahead:
            want = blocks[i - ahead]
            check_rows(receiver.take(want), want)
            receiver.release(want)


def test_rows_arrive_bitwise_in_order_and_bytes_are_the_closed_form():
    with Stage() as stage, stage.teacher():
        blocks = [block(i) for i in range(20)] + [block(20, density=0.0), block(21, density=1.1)]
        consume(stage.ranks[0], blocks)
        metrics = stage.ranks[0].metrics()
        rows = sum(b.row_ids_N.numel() for b in blocks)
        assert metrics["stream/rows_received"] == metrics["stream/rows_asked"] == rows
        assert metrics["stream/bytes"] == sizes.wire_payload_bytes(rows, HIDDEN)
        assert stage.ranks[0].allocated_bytes == sizes.ring_bytes(3, b=2, s=16, hidden_size=HIDDEN)


# fan-out with remainder, context parallel both ways, teacher ranks that share and that replicate
@pytest.mark.parametrize("side,teacher,spread", [(Side(tp=3), Side(tp=2), True), (Side(tp=2, cp=2), Side(cp=2, tp=2), True), (Side(cp=2, cp_order="contiguous"), Side(), True),
                                                 (Side(tp=2), Side(tp=2), False)])
def test_every_rank_of_a_replica_gets_its_rows(side, teacher, spread):
    with Stage(side=side, spread=spread) as stage, stage.teacher(teacher=teacher):
        for b in [block(i) for i in range(4)]:
            for receiver in stage.ranks:
                receiver.post(b)
            got = [receiver.take(b) for receiver in stage.ranks]
            for rows in got:
                check_rows(rows, b)
            ids = torch.cat([rows.row_ids_N for rows in (got if spread else got[::side.tp])])
            assert torch.equal(ids.sort().values, b.row_ids_N)
            for receiver in stage.ranks:
                receiver.release(b)
        deadline = time.monotonic() + 5  # every rank can write the log: what the asking rank knows reaches the others
        while stage.ranks[-1].metrics()["stream/replicas_alive"] != 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all(receiver.metrics()["stream/replicas_alive"] == 1 for receiver in stage.ranks)


def test_evaluation_has_a_ring_of_its_own_while_training_blocks_wait():
    with Stage() as stage, stage.teacher():
        receiver = stage.ranks[0]
        train, evals = [block(i) for i in range(3)], [block(i, mode="eval") for i in range(8)]
        for b in train:
            receiver.post(b)
        consume(receiver, evals)
        for b in train:
            check_rows(receiver.take(b), b)
            receiver.release(b)


def test_packed_documents_and_positions_reach_the_teacher():
    seen = []

    def rows(b):
        seen.append(b)
        return rows_of(b)

    packed = type(block(0))(tokens_bs=torch.arange(16)[None], loss_mask_bs=torch.ones(1, 16), cu_seqlens=torch.tensor([0, 4, 16], dtype=torch.int32),
                            position_ids_bs=torch.cat([torch.arange(4), torch.arange(12)])[None], step=0, micro_batch=0)
    with Stage(side=Side(cp=2)) as stage, stage.teacher(rows=rows):
        for receiver in stage.ranks:
            receiver.post(packed)
        got = [receiver.take(packed) for receiver in stage.ranks]
        assert [g.row_ids_N.tolist() for g in got] == [[0, 3, 4, 5, 6, 13, 14, 15], [1, 2, 7, 8, 9, 10, 11, 12]]
        assert torch.equal(seen[0].position_ids_bs, packed.position_ids_bs) and torch.equal(seen[0].cu_seqlens, packed.cu_seqlens)


def test_fp8_rows_arrive_within_their_step():
    agreed = type(AGREED)(fingerprint=AGREED.fingerprint, head_transform="none", hidden_size=HIDDEN, wire_dtype="fp8")
    with Stage(wire_dtype="fp8") as stage, stage.teacher(agreement=agreed):
        b = block(1)
        stage.ranks[0].post(b)
        got, want = stage.ranks[0].take(b).hidden_NH.float(), rows_of(b).hidden_NH.float()
        assert 0 < (got - want).abs().max() <= want.abs().max() / 14


def test_requests_are_shared_by_replicas_and_a_polite_leave_loses_nothing():
    served = {"A": 0, "B": 0}

    def count(name):
        def rows(b):
            served[name] += 1
            time.sleep(0.005)
            return rows_of(b)
        return rows

    with Stage() as stage:
        a, b = stage.teacher("A", rows=count("A")), stage.teacher("B", rows=count("B"))
        receiver = stage.ranks[0]
        receiver.wait_for_teachers(2)
        consume(receiver, [block(i) for i in range(12)])
        assert min(served.values()) >= 3
        a.close()
        before = served["A"]
        consume(receiver, [block(i) for i in range(12, 20)])
        assert served["A"] == before and receiver.counters.replicas_lost == 0 and receiver.metrics()["stream/replicas_alive"] == 1
        b.close()


def test_the_next_forwards_run_while_rows_are_on_their_way_and_no_more_than_there_is_memory_for():
    forwards, overlapped, at_most = [], [], []

    def rows(b):
        forwards.append(b.step)
        return rows_of(b)

    def on_write(piece, staging):
        step, deadline = len(overlapped), time.monotonic() + 5
        while step + 1 not in forwards and time.monotonic() < deadline and step < 9:
            time.sleep(0.001)
        overlapped.append(step + 1 in forwards)
        time.sleep(0.01)
        at_most.append(max(forwards) - step)

    with Stage(fabric=Fabric(on_write), ring_depth=6) as stage, stage.teacher(rows=rows) as teacher:
        consume(stage.ranks[0], [block(i) for i in range(10)], ahead=5)
        assert all(overlapped[:9]) and max(at_most) <= sizes.NUM_STAGED
        assert sum(buffer.numel() for buffer in teacher.senders[0]._buffers) == sizes.staging_bytes(2, 16, HIDDEN)


def test_what_a_job_of_the_writer_raises_reaches_the_serve_loop():
    def broken():
        raise ValueError("out of order")

    with pytest.raises(ValueError, match="out of order"), Writer() as writer:
        writer.put(broken)
        for _ in range(3):
            writer.reserve()
            writer.put(lambda: None)


def test_a_late_write_of_a_silent_replica_cannot_land_in_a_reused_slot():
    """Replica A stalls in the middle of a write; B answers; A's write then ends, and neither rows nor memory in use change."""
    reached, go = threading.Event(), threading.Event()
    slow = {"on": True}

    def on_write(piece, staging):
        if slow["on"] and any(staging is buffer for buffer in a.senders[0]._buffers):
            slow["on"] = False
            reached.set()
            go.wait(20)

    fabric = Fabric(on_write)
    with Stage(fabric=fabric, on_loss="reroute", answer_deadline_s=0.6) as stage:
        a = stage.teacher("A")
        receiver = stage.ranks[0]
        receiver.wait_for_teachers(1)
        blocks = [block(i) for i in range(12)]
        for x in blocks[:3]:
            receiver.post(x)
        assert reached.wait(5)
        with stage.teacher("B"):
            for i, x in enumerate(blocks):
                check_rows(receiver.take(x), x)
                if i == 6:
                    assert receiver.metrics()["stream/quarantined_slots"] == 3
                    go.set()
                receiver.release(x)
                if i + 3 < len(blocks):
                    receiver.post(blocks[i + 3])
            deadline = time.monotonic() + 5
            while receiver.metrics()["stream/quarantined_slots"] and time.monotonic() < deadline:
                time.sleep(0.05)  # A joins again once its write has ended, which frees what was quarantined because of it
            assert receiver.metrics()["stream/quarantined_slots"] == 0
            assert receiver.counters.reroutes == 3 and receiver.allocated_bytes == sizes.ring_bytes(3, b=2, s=16, hidden_size=HIDDEN)
        a.close()


def test_a_reroute_asks_only_for_the_ranks_that_have_no_rows_yet():
    """The link breaks between rank 0's part and rank 1's: rank 0 keeps its rows, rank 1 is asked for again, and both are right."""
    calls = []

    def on_write(piece, staging):
        calls.append(piece)
        if len(calls) == 2:
            while not stage.ranks[0].counters.rows_received:
                time.sleep(0.001)
            raise TransferFailed("the link broke")

    with Stage(side=Side(tp=2), fabric=Fabric(on_write), on_loss="reroute") as stage, stage.teacher():
        b = block(5)
        for receiver in stage.ranks:
            receiver.post(b)
        for receiver in stage.ranks:
            check_rows(receiver.take(b), b)
        assert len(calls) == 3 and calls[2].descriptor not in (calls[0].descriptor, calls[1].descriptor), "rank 1 alone, in fresh memory"
        assert stage.ranks[0].counters.reroutes == 1


def test_with_fail_the_loss_of_the_replica_ends_the_run_on_every_rank_and_names_it():
    def rows(b):
        if b.step == 2:
            raise ValueError("out of memory in layer 7")
        return rows_of(b)

    with Stage(side=Side(tp=2)) as stage, stage.teacher("gpu-node-3", rows=rows):
        for i in range(3):
            for receiver in stage.ranks:
                receiver.post(block(i))
            for receiver in stage.ranks:
                if i < 2:
                    check_rows(receiver.take(block(i)), block(i))
                    receiver.release(block(i))
                else:
                    with pytest.raises(TeacherLost, match="gpu-node-3.*out of memory in layer 7"):
                        receiver.take(block(i))


def test_a_wait_ends_at_its_deadline_and_says_for_whom():
    with Stage(deadline_s=0.5, answer_deadline_s=5.0) as stage:
        stage.ranks[0].post(block(0))
        began = time.monotonic()
        with pytest.raises(TeacherStalled, match="no teacher replica is connected"):
            stage.ranks[0].take(block(0))
        assert time.monotonic() - began < 1.5


def test_ranks_that_post_different_blocks_are_told_apart():
    with Stage(side=Side(tp=2)) as stage, stage.teacher():
        stage.ranks[0].post(block(0))
        stage.ranks[1].post(block(1))
        with pytest.raises(TeacherError, match="token hash by student rank"):
            stage.ranks[0].take(block(0))


@pytest.mark.parametrize("changes,error,words", [
    (dict(context_length=8), UnsupportedLayout, ["context length", "= 8", "16"]),
    (dict(agreement=type(AGREED)(fingerprint="cd" * 16, head_transform="none", hidden_size=HIDDEN)), FingerprintMismatch, ["cd" * 16, "ab" * 16]),
    (dict(agreement=type(AGREED)(fingerprint="ab" * 16, head_transform="softcap=30", hidden_size=HIDDEN)), FingerprintMismatch, ["softcap=30", "none"]),
    (dict(agreement=type(AGREED)(fingerprint="ab" * 16, head_transform="none", hidden_size=32)), FingerprintMismatch, ["32", "24"]),
    (dict(head_digest="77"), FingerprintMismatch, ["77", "55"]),
])
def test_a_wrong_teacher_is_refused_at_the_handshake_with_both_values_and_a_right_one_serves_on(changes, error, words):
    with Stage(head_digest="55") as stage:
        with stage.teacher("right", head_digest="55"), stage.teacher("wrong", **{"head_digest": "55"} | changes) as wrong:
            wrong.thread.join(5)
            assert type(wrong.error) is error and all(word in str(wrong.error) for word in words), wrong.error
            consume(stage.ranks[0], [block(i) for i in range(4)])
            assert stage.ranks[0].counters.refused_joins == 1


def test_the_first_replica_sets_the_fingerprint_where_none_is_given():
    other = type(AGREED)(fingerprint="cd" * 16, head_transform="none", hidden_size=HIDDEN)
    with Stage(fingerprint=None) as stage, stage.teacher("first"):
        stage.ranks[0].wait_for_teachers(1)
        with stage.teacher("second", agreement=other) as second:
            second.thread.join(5)
            assert isinstance(second.error, FingerprintMismatch)
        assert stage.ranks[0].agreement == AGREED


@pytest.mark.parametrize("lie,error", [("rows", RowsMismatch), ("bits", TransferFailed)])
def test_a_lying_or_broken_transfer_is_refused_with_both_values(lie, error):
    def rows(b):
        if lie != "rows":
            return rows_of(b)
        mask = b.loss_mask_bs.clone()
        mask.view(-1)[b.row_ids_N[-1]] = 0
        object.__setattr__(b, "loss_mask_bs", mask)  # the teacher now believes in one row less
        return rows_of(b)

    def on_write(piece, staging):
        if lie == "bits":
            staging[5] ^= 1

    with Stage(fabric=Fabric(on_write)) as stage, stage.teacher(rows=rows):
        stage.ranks[0].post(block(0))
        with pytest.raises(error, match="must be the"):
            stage.ranks[0].take(block(0))


def test_the_slot_is_sized_by_the_first_block_and_a_larger_one_is_refused():
    with Stage() as stage:
        stage.ranks[0].post(block(0))
        with pytest.raises(Exception, match="slot of 32 rows"):
            stage.ranks[0].post(block(1, b=4, density=1.1))


def test_without_any_replica_ce_only_gives_up_at_once_on_every_rank_and_a_replica_that_comes_is_used_again():
    """Killed with three blocks owed; twenty blocks, some without a row, pass without it in less time than one deadline; the next replica is asked for fresh ones alone."""
    stuck, ahead, served = threading.Event(), 2, []

    def rows(b):
        if b.step == 4:
            stuck.wait(20)
        return rows_of(b)

    def again(b):
        served.append(b.step)
        return rows_of(b)

    blocks = [block(i, density=0.0 if i % 5 == 0 else 0.7) for i in range(60)]
    with Stage(side=Side(tp=2), on_loss="ce_only", deadline_s=20.0, heartbeat_s=5.0) as stage:
        first = stage.teacher("A", rows=rows)
        stage.ranks[0].wait_for_teachers(1)

        def step(i):
            """Whether the ranks took the block; they agree, as the training does in its collective."""
            for receiver in stage.ranks:
                for b in blocks[i:i + ahead + 1]:
                    if b.key not in posted[receiver]:
                        posted[receiver].add(b.key)
                        receiver.post(b)
            got = []
            for receiver in stage.ranks:
                try:
                    got.append(receiver.take(blocks[i]))
                except TeacherLost:
                    got.append(None)
            for receiver in stage.ranks:
                receiver.give_up(blocks[i]) if None in got else receiver.release(blocks[i])
            if None not in got:
                for rows_ in got:
                    check_rows(rows_, blocks[i])
            return None not in got

        posted = {receiver: set() for receiver in stage.ranks}
        assert all(step(i) for i in range(4))
        first.publisher.close()  # its connection ends with blocks 4 to 6 owed, as when it is killed
        began = time.monotonic()
        taken = [i for i in range(4, 24) if step(i)]
        assert time.monotonic() - began < 3.0 < 20.0 and set(taken) <= {5, 10, 15, 20}, "only blocks of which no row is asked"
        deadline = time.monotonic() + 2
        while any(len(receiver._lanes[0].blocks) > ahead for receiver in stage.ranks) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(len(receiver._lanes[0].blocks) == ahead for receiver in stage.ranks), "what was given up is forgotten"
        stuck.set()
        with stage.teacher("B", rows=again):
            deadline = time.monotonic() + 10
            while not all(receiver.metrics()["stream/replicas_alive"] for receiver in stage.ranks) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert all(step(i) for i in range(24, 58))
        assert min(served) >= 24 and {r.counters.degraded_blocks for r in stage.ranks} == {20 - len(taken)}
        first.close()


def test_a_rank_that_connects_after_the_replica_hears_of_its_loss_as_well():
    fabric, hub = Fabric(), Hub(("127.0.0.1", 0), TOKEN, "run-1")
    spec = student_spec(hub.address, side=Side(tp=2), on_loss="ce_only", deadline_s=20.0, heartbeat_s=5.0)
    with Receiver(spec, LoopbackInbox(fabric)) as first, ThreadTeacher(hub.address, fabric) as teacher:
        first.wait_for_teachers(1)
        with Receiver(replace(spec, rank=1), LoopbackInbox(fabric)) as second:
            deadline = time.monotonic() + 5
            while second.agreement is None and time.monotonic() < deadline:
                time.sleep(0.001)
            teacher.publisher.close()
            began = time.monotonic()
            for receiver in (first, second):
                receiver.post(block(0))
            for receiver in (first, second):
                with pytest.raises(TeacherLost, match="is connected|does not ask"):
                    receiver.take(block(0))
            assert time.monotonic() - began < 3.0
    hub.close()


def test_blocks_that_were_given_up_free_their_slots():
    with Stage(deadline_s=0.3, on_loss="reroute") as stage:
        receiver, blocks = stage.ranks[0], [block(i, density=0.0 if i == 4 else 0.7) for i in range(12)]
        for b in blocks[:6]:
            receiver.post(b)
        for b in blocks[:2] + blocks[3:6]:
            if b.row_ids_N.numel() or b is not blocks[4]:
                with pytest.raises(TeacherStalled):
                    receiver.take(b)
            receiver.give_up(b)
        with stage.teacher():
            check_rows(receiver.take(blocks[2]), blocks[2])
            receiver.release(blocks[2])
            consume(receiver, blocks[6:])
        assert receiver.counters.degraded_blocks == 5


def test_two_student_replicas_share_two_teachers_found_at_one_rendezvous():
    served = {"A": set(), "B": set()}

    def note(name):
        def rows(b):
            served[name].add(b.step)
            return rows_of(b)
        return rows

    with Stage() as stage, stage.teacher("A", rows=note("A")), stage.teacher("B", rows=note("B")):
        other = Receiver(student_spec(stage.hub.address, dp_rank=1), LoopbackInbox(stage.fabric))
        both = [(stage.ranks[0], range(0, 30)), (other, range(100, 130))]
        errors = []

        def run(receiver, steps):
            try:
                receiver.wait_for_teachers(2)
                consume(receiver, [block(i) for i in steps])
            except BaseException as e:  # noqa: BLE001 -- shown below
                errors.append(e)

        threads = [threading.Thread(target=run, args=pair) for pair in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not errors and not any(thread.is_alive() for thread in threads)
        assert served["A"] | served["B"] == set(range(30)) | set(range(100, 130)) and not served["A"] & served["B"]
        assert all({step // 100 for step in steps} == {0, 1} for steps in served.values()), "each teacher serves both"
        other.close()


def test_a_write_that_never_ends_is_waited_for_until_a_deadline():
    hold = threading.Event()
    writer = Writer(deadline_s=0.3)
    try:
        for _ in range(2):
            writer.put(lambda: hold.wait(20))
        began = time.monotonic()
        with pytest.raises(TeacherStalled, match="on their way"):
            writer.reserve()
        assert 0.2 < time.monotonic() - began < 5
    finally:
        hold.set()
        writer.close()
