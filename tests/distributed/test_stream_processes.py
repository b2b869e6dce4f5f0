"""The stream between processes over NIXL: long runs, killed and stopped peers, a cut network. Rows are checked bit for bit throughout."""

import os
import shutil
import signal
import subprocess
import time

import pytest

pytest.importorskip("nixl")

from megatron_kd.stream import sizes  # noqa: E402
from tests.stream_peers import AGREED  # noqa: E402
from tests.stream_process import Child, chain, student, teacher  # noqa: E402


def test_a_thousand_blocks_with_random_delays_keep_order_and_memory():
    with Child(student, steps=1000, delay_s=0.002, ahead=3) as s, Child(teacher, hub=s.wait("hub"), delay_s=0.002):
        done = s.wait("done", timeout_s=60)
    assert done["chain"] == chain(0, 1000)
    assert done["allocated"] == sizes.ring_bytes(4, b=2, s=16, hidden_size=AGREED.hidden_size)
    assert done["stream/bytes"] == sizes.wire_payload_bytes(int(done["stream/rows_asked"]), AGREED.hidden_size)
    assert done["late_parts"] == done["reroutes"] == 0
    growth = done["memory"][-1] - done["memory"][1]  # from block 200 to block 1,000
    assert growth < 8, f"resident memory grew by {growth:.1f} MiB over 800 blocks: {done['memory']}"


def test_kill_9_of_one_of_two_replicas_costs_no_step_and_a_restarted_one_is_taken_back():
    with Child(student, steps=120, delay_s=0.03, teachers=2, on_loss="reroute") as s:
        hub = s.wait("hub")
        with Child(teacher, hub=hub, name="A", delay_s=0.02) as a, Child(teacher, hub=hub, name="B", delay_s=0.02):
            s.wait("taken", at_least=10)
            a.signal(signal.SIGKILL)
            s.wait("taken", at_least=30)
            with Child(teacher, hub=hub, name="A") as again:
                again.wait("students", at_least=1)
                done = s.wait("done", timeout_s=60)
    assert done["chain"] == chain(0, 120)
    assert done["replicas_lost"] == 1 and done["stream/replicas_alive"] == 2 and done["reroutes"] <= 3


def test_kill_9_of_the_only_replica_with_fail_ends_in_time_names_it_and_a_resume_continues_bit_for_bit():
    with Child(student, steps=200, delay_s=0.01) as s, Child(teacher, hub=s.wait("hub"), name="node7") as t:
        s.wait("taken", at_least=20)
        t.signal(signal.SIGKILL)
        killed = time.monotonic()
        text = s.wait("raised", timeout_s=20)
        assert time.monotonic() - killed < 5, "an ended process is noticed at once, long before any deadline"
        assert "TeacherLost" in text and "node7" in text
        last, state = [event[1:] for event in s.events if event[0] == "taken"][-1]
    with Child(student, steps=200 - last - 1, first=last + 1, start=state) as s, Child(teacher, hub=s.wait("hub")):
        assert s.wait("done")["chain"] == chain(0, 200)


def test_kill_9_of_the_student_frees_everything_and_the_teacher_serves_the_next_one():
    with Child(student, steps=10_000, delay_s=0.01) as first:
        hub = first.wait("hub")
        with Child(teacher, hub=hub) as t:
            first.wait("taken", at_least=20)
            t.wait("students", at_least=1)
            first.signal(signal.SIGKILL)
            first.process.join(5)
            while t.wait("students", timeout_s=10):
                pass
            assert t.events[-1][2] == 0, "requests of the dead student are still queued"
            with Child(student, steps=30, port=hub[1]) as second:
                assert second.wait("done")["chain"] == chain(0, 30)
            assert t.process.is_alive()


def test_sigstop_in_the_middle_of_a_write_reroute_sigcont():
    """A is stopped while it writes 24 MiB; B answers; A wakes up, finishes its write into quarantined memory, and joins again."""
    wide = dict(hidden=6144, shape=(1, 2048))
    env = {"UCX_TLS": "tcp"}  # the slowest path: a write takes tens of milliseconds
    with Child(student, steps=24, delay_s=0.05, teachers=1, on_loss="reroute", heartbeat_timeout_s=1.5, deadline_s=30.0, settle_s=10.0, env=env, **wide) as s:
        hub = s.wait("hub")
        with Child(teacher, hub=hub, name="A", hidden=6144, announce_writes=True, env=env) as a:
            a.wait("writing", at_least=2)
            time.sleep(0.004)
            a.signal(signal.SIGSTOP)
            with Child(teacher, hub=hub, name="B", hidden=6144, env=env):
                s.wait("taken", at_least=8)
                a.signal(signal.SIGCONT)
                done = s.wait("done", timeout_s=60)
    assert done["chain"] == chain(0, 24, hidden=6144, shape=(1, 2048))
    assert done["replicas_lost"] >= 1 and done["reroutes"] >= 1
    assert done["stream/quarantined_slots"] == 0, "A joined again, so nothing of it is under way"
    assert done["allocated"] == sizes.ring_bytes(3, b=1, s=2048, hidden_size=6144)


@pytest.fixture
def namespaces():
    """Two network namespaces joined by a veth pair: (student's, teacher's name, student's address, cut, heal)."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    tag = f"kd{os.getpid() % 10000}"
    left, right = f"{tag}s", f"{tag}t"

    def ip(*words, check=True):
        return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)

    try:
        ip("netns", "add", left), ip("netns", "add", right)
        ip("link", "add", f"{left}0", "type", "veth", "peer", "name", f"{right}0")
        for name, address in ((left, "10.231.7.1/24"), (right, "10.231.7.2/24")):
            ip("link", "set", f"{name}0", "netns", name)
            ip("-n", name, "addr", "add", address, "dev", f"{name}0")
            ip("-n", name, "link", "set", f"{name}0", "up"), ip("-n", name, "link", "set", "lo", "up")
    except (subprocess.CalledProcessError, PermissionError) as e:
        for name in (left, right):
            ip("netns", "del", name, check=False)
        pytest.skip(f"network namespaces do not work here: {getattr(e, 'stderr', e)}")
    yield left, right, "10.231.7.1", lambda: ip("-n", right, "link", "set", f"{right}0", "down"), lambda: ip("-n", right, "link", "set", f"{right}0", "up")
    for name in (left, right):
        ip("netns", "del", name, check=False)


def test_a_cut_network_is_noticed_by_silence_and_healed_without_losing_a_step(namespaces):
    left, right, address, cut, heal = namespaces
    def env(name):
        return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": f"{name}0"}
    with Child(student, host=address, steps=60, delay_s=0.02, on_loss="reroute", heartbeat_s=0.4, deadline_s=30.0, namespace=left, env=env(left)) as s:
        with Child(teacher, hub=s.wait("hub"), delay_s=0.02, namespace=right, env=env(right)):
            s.wait("taken", at_least=15)
            cut()
            time.sleep(3)
            heal()
            done = s.wait("done", timeout_s=60)
    assert done["chain"] == chain(0, 60)
    assert done["replicas_lost"] >= 1, "three missed heartbeats must count as a loss"
