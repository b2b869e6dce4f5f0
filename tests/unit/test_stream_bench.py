"""`megatron-kd bench stream`: a small run of two processes on the CPU; its table and its JSON."""

import json

import pytest

pytest.importorskip("nixl")

from megatron_kd.cli.bench_stream import MEANINGS  # noqa: E402
from megatron_kd.cli.main import main  # noqa: E402
from megatron_kd.stream.trace import EVENTS, Trace  # noqa: E402


def test_every_step_of_a_blocks_way_is_timed_and_the_rows_are_right(tmp_path, capsys):
    path = tmp_path / "stream.json"
    assert main(["bench", "stream", "--device", "cpu", "--rows", "64", "--hidden", "32", "--micro-batches", "20", "--checksum", "on", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    (result,) = report["results"]
    assert result["rows_wrong"] == 0 and result["block_bytes"] == 64 * 32 * 2 and result["checksum"] == "xxh3"
    assert set(result["phases_us"]) == {f"{a} -> {b}" for a, b in MEANINGS}
    assert [a for a, _ in MEANINGS] == list(EVENTS[:-1]) and [b for _, b in MEANINGS] == list(EVENTS[1:])
    waits = ("written -> noticed",)  # the message may be seen before the writer learns that its write is complete
    assert all(value >= 0 for name, value in result["phases_us"].items() if name not in waits)
    assert result["gb_per_s"] > 0 and result["teacher_cycle_us"] > 0 and min(result["cpu_us"].values()) > 0
    assert result["p2p"]["backend"] == "gloo" and result["p2p"]["gb_per_s"] > 0
    out = capsys.readouterr().out
    assert "GB/s" in out and all(meaning in out for meaning in MEANINGS.values())


def test_a_mark_keeps_its_first_time_and_leaves_evaluation_out():
    trace = Trace()
    trace.mark("asked", 0, 3)
    first = trace.times_s["asked"][3]
    trace.mark("asked", 0, 3)
    trace.mark("asked", 1, 4)
    assert trace.times_s["asked"] == {3: first}


@pytest.mark.parametrize("options, words", [(["--ring-depth", "1"], "must be at least"), (["--device", "cuda"], "two are needed")])
def test_what_cannot_be_measured_is_refused(options, words, capsys):
    assert main(["bench", "stream", "--device", "cpu", *options]) == 1
    assert words in capsys.readouterr().err
