"""Wire forms: what comes back is what was sent, and what is not right is refused with both values."""

import dataclasses
import struct

import numpy as np
import pytest
import torch

from megatron_kd.errors import FingerprintMismatch, RowsMismatch, TransferFailed, WireError, WireVersionMismatch
from megatron_kd.rows import TokenBlock
from megatron_kd.stream import sizes, wire
from megatron_kd.stream.channel import WIRE_VERSION
from megatron_kd.stream.wire import Agreement, Grant, PartHeader, Request

AGREED = Agreement(fingerprint="ab" * 16, head_transform="none", hidden_size=10)


def header(**changes) -> PartHeader:
    values = dict(agreement=AGREED.digest, seq=7, lane=1, generation=3, teacher_rank=2, num_parts=4, num_rows=5, total_rows=9, hash=2**63 + 1, checksum=2**64 - 1,
                  checksum_kind="xxh3", runs=((0, 2), (6, 3)))
    return PartHeader(**values | changes)


def block(**changes) -> TokenBlock:
    generator = torch.Generator().manual_seed(1)
    values = dict(tokens_bs=torch.randint(0, 2**31 - 1, (2, 7), generator=generator), loss_mask_bs=(torch.rand(2, 7, generator=generator) < 0.5).float(), step=4, micro_batch=2)
    return TokenBlock(**values | changes)


def test_header_survives_the_wire_and_reads_version_and_agreement_before_the_body():
    assert PartHeader.unpack(header().pack(), AGREED.digest) == header()
    data = bytearray(header().pack())[:-3]  # a broken body must not hide that the version is another
    struct.pack_into("<H", data, 2, 9)
    with pytest.raises(WireVersionMismatch, match=f"= 9.*ours, {WIRE_VERSION}"):
        PartHeader.unpack(bytes(data), AGREED.digest)
    with pytest.raises(FingerprintMismatch, match=f"{AGREED.digest:#x}.*0x5"):
        PartHeader.unpack(header().pack()[:-3], 5)


@pytest.mark.parametrize("data", [b"", b"KP", b"garbage" * 20, header().pack()[:-1], header().pack() + b"x"])
def test_a_message_that_is_no_header_is_refused(data):
    with pytest.raises(WireError):
        PartHeader.unpack(data, AGREED.digest)


def test_runs_that_do_not_add_up_are_refused():
    with pytest.raises(RowsMismatch, match="= 5.*count, 6"):
        PartHeader.unpack(header(num_rows=6).pack(), AGREED.digest)


@pytest.mark.parametrize("name,value", [("fingerprint", "cd" * 16), ("head_transform", "softcap=30.0"), ("hidden_size", 12), ("wire_dtype", "fp8")])
def test_agreement_names_the_field_and_both_values(name, value):
    other = dataclasses.replace(AGREED, **{name: value})
    with pytest.raises(FingerprintMismatch) as e:
        AGREED.check(other, "teacher B")
    assert name in str(e.value) and repr(value) in str(e.value) and repr(getattr(AGREED, name)) in str(e.value) and "teacher B" in str(e.value)
    assert other.digest != AGREED.digest
    AGREED.check(dataclasses.replace(AGREED), "teacher A")


@pytest.mark.parametrize("extra", [{}, {"position_ids_bs": torch.arange(14).reshape(2, 7) % 5},
                                   {"tokens_bs": torch.arange(12)[None], "loss_mask_bs": torch.ones(1, 12), "cu_seqlens": torch.tensor([0, 5, 12], dtype=torch.int32)}])
def test_request_survives_the_wire(extra):
    want = Request(seq=3, lane=0, block=block(**extra), grants=(Grant(student_rank=0, generation=2, descriptor=b"abc"), Grant(student_rank=1, generation=0, descriptor=b"")))
    got = Request.decode(want.encode())
    assert got.grants == want.grants and (got.seq, got.lane) == (3, 0) and got.block.key == want.block.key and got.block.hash == want.block.hash
    assert torch.equal(got.block.tokens_bs, want.block.tokens_bs) and torch.equal(got.block.row_ids_N, want.block.row_ids_N)
    for name in ("position_ids_bs", "cu_seqlens"):
        a, b = getattr(got.block, name), getattr(want.block, name)
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    body = sum(len(x) for x in want.encode()["blobs"][:-2]) - (12 if "cu_seqlens" in extra else 0)
    assert body == sizes.request_bytes(*want.block.tokens_bs.shape, positions="position_ids_bs" in extra)


def test_request_with_another_hash_or_missing_parts_is_refused():
    message = Request(seq=0, lane=0, block=block(), grants=()).encode()
    with pytest.raises(RowsMismatch, match="token hash"):
        Request.decode(message | {"hash": 5})
    for broken in ({"shape": [2, 8]}, {"blobs": message["blobs"][:1]}, {"grants": [[0, 0]]}, {"seq": None, "shape": "x"}):
        with pytest.raises(WireError):
            Request.decode(message | broken)
    with pytest.raises(WireError, match="2\\^31"):
        Request(seq=0, lane=0, block=block(tokens_bs=torch.full((2, 7), 2**31)), grants=()).encode()


@pytest.mark.parametrize("hidden", [10, 64])  # 10: rows need padding to 16 bytes; 64: none
@pytest.mark.parametrize("wire_dtype,dtype", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_plain_rows_are_bitwise_and_a_view(hidden, wire_dtype, dtype):
    rows = torch.randn(6, hidden, dtype=dtype) * 1e5  # beyond float16's range
    slot = torch.full((6 * sizes.row_bytes(hidden, wire_dtype),), 255, dtype=torch.uint8)
    wire.encode_rows(rows, wire.as_rows(slot, 6, hidden, wire_dtype), wire_dtype)
    got = wire.decode_rows(wire.as_rows(slot, 6, hidden, wire_dtype), hidden, wire_dtype)
    assert torch.equal(got, rows) and got.data_ptr() == slot.data_ptr()


def test_fp8_rows_keep_each_row_within_an_eighth_of_its_mantissa_step():
    rows = torch.randn(50, 96, dtype=torch.bfloat16) * torch.logspace(-6, 6, 50)[:, None].bfloat16()
    rows[3] = 0
    slot = torch.empty(50 * sizes.row_bytes(96, "fp8"), dtype=torch.uint8)
    view = wire.as_rows(slot, 50, 96, "fp8")
    wire.encode_rows(rows, view, "fp8")
    got = wire.decode_rows(view, 96, "fp8").float()
    largest = rows.float().abs().amax(1, keepdim=True)
    assert torch.all((got - rows.float()).abs() <= rows.float().abs() / 14 + largest * 2.0**-17)  # e4m3: half of 2^-3, then bfloat16's; subnormals below
    assert torch.equal(got[3], torch.zeros(96))
    assert sizes.row_bytes(96, "fp8") == 112 < sizes.row_bytes(96)


@pytest.mark.parametrize("kind", ["xxh3", "sum64"])
def test_checksum_sees_one_flipped_bit_and_two_exchanged_rows(kind):
    rows = torch.randint(0, 256, (8, 32), dtype=torch.uint8)
    want = wire.checksum([rows], kind)
    assert wire.checksum([rows[:3], rows[3:]], kind) == want
    flipped = rows.clone()
    flipped[5, 17] ^= 1
    exchanged = rows[[0, 2, 1, 3, 4, 5, 6, 7]]
    assert want not in (wire.checksum([flipped], kind), wire.checksum([exchanged], kind))
    assert wire.checksum([rows], "none") == 0
    if kind == "sum64":
        assert want == sum(int(word) * (2 * i + 1) for i, word in enumerate(rows.view(torch.int64).flatten())) % 2**64, "the documented sum"


def test_a_part_with_another_hash_count_or_content_is_refused_with_both_values():
    slot = torch.arange(9 * 32, dtype=torch.int64).to(torch.uint8)
    rows = wire.as_rows(slot, 9, 10, "bf16")
    good = header(checksum=wire.checksum([rows[0:2], rows[6:9]], "xxh3"))
    wire.verify_part(good, slot, AGREED, hash_=good.hash, total_rows=9, source="A")
    with pytest.raises(RowsMismatch, match="0x8000000000000001.*0x11"):
        wire.verify_part(good, slot, AGREED, hash_=17, total_rows=9, source="A")
    with pytest.raises(RowsMismatch, match="= 9.*the 8 asked"):
        wire.verify_part(good, slot, AGREED, hash_=good.hash, total_rows=8, source="A")
    with pytest.raises(RowsMismatch, match="= 10.*the 9 asked"):
        wire.verify_part(dataclasses.replace(good, runs=((0, 2), (7, 3))), slot, AGREED, hash_=good.hash, total_rows=9, source="A")
    slot[7 * 32] ^= 1
    with pytest.raises(TransferFailed, match=f"must be the sent {good.checksum:#x}"):
        wire.verify_part(good, slot, AGREED, hash_=good.hash, total_rows=9, source="A")


def test_sizes_by_hand():
    assert sizes.row_bytes(2880) == 5760 and sizes.row_bytes(10) == 32
    assert sizes.slot_bytes(1, 8192, 2880, tp=4, cp=2) == 1024 * 5760
    assert sizes.ring_bytes(3, b=2, s=100, hidden_size=8, tp=3) == 3 * 67 * 16
    assert sizes.wire_payload_bytes(1000, 2880) == 5_760_000 == sizes.wire_payload_bytes(1000, 2880, student_tp=2, spread=False) // 2
    assert np.isclose(sizes.row_bytes(2880, "fp8") / sizes.row_bytes(2880), 0.5, atol=0.01)
