"""Coded rows: ids and tails exact, log-probabilities within rounding, and no more bytes than promised."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.cache import sizes
from megatron_kd.cache.codec import TopKRows, decode_hidden, decode_topk, encode_hidden, encode_topk
from megatron_kd.cache.spec import PayloadSpec
from megatron_kd.errors import CacheCorrupt, ConfigError, NonFiniteTeacher, VocabMismatch


def spec(width, vocab, precision="bf16", kind="topk"):
    return PayloadSpec(kind=kind, width=width, vocab_size=vocab, precision=precision)


def random_rows(num_rows, width, vocab, seed=0):
    """Uniformly random ids (the worst case for the coding) in random order, log-probabilities of a teacher with a long tail."""
    generator = np.random.default_rng(seed)
    ids = np.stack([generator.choice(vocab, width, replace=False) for _ in range(num_rows)])
    logits = generator.normal(scale=3.0, size=(num_rows, width))
    tail = generator.uniform(0.0, 0.3, size=num_rows).astype(np.float32)
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True)) + np.log1p(-tail.astype(np.float64))[:, None]
    return TopKRows(torch.from_numpy(ids), torch.tensor(log_probs, dtype=torch.float32), torch.from_numpy(tail))


def by_id(rows):
    """The same rows with ids ascending."""
    ids, order = rows.ids_NK.sort(dim=1)
    return TopKRows(ids, rows.log_probs_NK.gather(1, order), rows.tail_N)


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(0, 9), width=st.integers(1, 12), vocab=st.sampled_from([12, 255, 257, 65_537, 248_320, 2**32]), seed=st.integers(0, 2**31),
       precision=st.sampled_from(["bf16", "fp32"]))
def test_ids_and_tail_are_exact_and_log_probs_are_rounded_once(num_rows, width, vocab, seed, precision):
    generator = np.random.default_rng(seed)
    ids = np.array([generator.choice(min(vocab, 1000), width, replace=False) * (vocab // min(vocab, 1000)) for _ in range(num_rows)], dtype=np.int64).reshape(num_rows, width)
    rows = TopKRows(torch.from_numpy(ids), torch.tensor(-generator.exponential(8.0, (num_rows, width)), dtype=torch.float32),
                    torch.tensor(generator.uniform(0, 0.999, num_rows), dtype=torch.float32))
    got = decode_topk(encode_topk(rows, spec(width, vocab, precision)), num_rows, spec(width, vocab, precision), rescale=False)
    want = by_id(rows)
    assert torch.equal(got.ids_NK, want.ids_NK) and torch.equal(got.tail_N, want.tail_N)
    rounded = want.log_probs_NK.to(torch.bfloat16).float() if precision == "bf16" else want.log_probs_NK
    assert torch.equal(got.log_probs_NK, rounded)


@pytest.mark.parametrize("ids, vocab", [([0, 131_071, 131_072, 248_319], 248_320), ([0, 201_087, 65_535, 65_536], 201_088), ([0, 2**31 - 1, 2**31, 2**32 - 1], 2**32)])
def test_ids_at_the_edges(ids, vocab):
    rows = TopKRows(torch.tensor([ids]), torch.full((1, 4), -1.5), torch.tensor([0.1]))
    got = decode_topk(encode_topk(rows, spec(4, vocab)), 1, spec(4, vocab))
    assert got.ids_NK[0].tolist() == sorted(ids)


@pytest.mark.parametrize("precision, limit", [("bf16", 420), ("fp32", 560)])
def test_bytes_a_token_at_100_of_248320(precision, limit):
    """420 is the promise for bf16; uniformly random ids are the worst case."""
    rows, made = random_rows(512, 100, 248_320), spec(100, 248_320, precision)
    measured = len(encode_topk(rows, made)) / 512
    estimate = sizes.topk_bytes_per_token(100, 248_320, precision)
    assert measured <= limit and measured <= estimate <= 1.25 * measured
    assert precision == "fp32" or measured < sizes.raw_bitpacked_bytes_per_token(100, 248_320) == 429


def test_kept_mass_is_one_minus_tail_after_reading():
    rows, made = random_rows(64, 20, 5000), spec(20, 5000)
    plain, rescaled = (decode_topk(encode_topk(rows, made), 64, made, rescale=choice) for choice in (False, True))
    drift = (plain.log_probs_NK.exp().sum(1) + plain.tail_N - 1).abs()
    assert drift.max() > 1e-4, "bf16 rounding moves the mass"
    assert (rescaled.log_probs_NK.exp().sum(1) + rescaled.tail_N - 1).abs().max() < 1e-6
    shift = rescaled.log_probs_NK - plain.log_probs_NK
    assert (shift - shift[:, :1]).abs().max() < 1e-5, "one shift a row"


def test_draws_are_not_rescaled():
    made = spec(3, 50, "fp32", kind="sampled")
    rows = TopKRows(torch.tensor([[4, 9, 2]]), torch.tensor([[math.log(0.5), math.log(0.25), -10_000.0]]), torch.zeros(1))
    got = decode_topk(encode_topk(rows, made), 1, made)
    assert torch.equal(got.log_probs_NK, by_id(rows).log_probs_NK)


BAD_ROWS = {
    "repeated id": (TopKRows(torch.tensor([[1, 1]]), torch.full((1, 2), -1.0), torch.zeros(1)), VocabMismatch, "distinct"),
    "id of a padding column": (TopKRows(torch.tensor([[1, 50]]), torch.full((1, 2), -1.0), torch.zeros(1)), VocabMismatch, r"\[0, 50\)"),
    "negative id": (TopKRows(torch.tensor([[1, -1]]), torch.full((1, 2), -1.0), torch.zeros(1)), VocabMismatch, r"\[0, 50\)"),
    "NaN": (TopKRows(torch.tensor([[1, 2]]), torch.tensor([[-1.0, math.nan]]), torch.zeros(1)), NonFiniteTeacher, "NaN"),
    "tail of 1": (TopKRows(torch.tensor([[1, 2]]), torch.full((1, 2), -1.0), torch.ones(1)), VocabMismatch, "tail"),
    "another K": (TopKRows(torch.tensor([[1, 2, 3]]), torch.full((1, 3), -1.0), torch.zeros(1)), VocabMismatch, r"\[N, 2\]"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_cannot_be_right_are_refused(name):
    rows, error, text = BAD_ROWS[name]
    with pytest.raises(error, match=text):
        encode_topk(rows, spec(2, 50))


@pytest.mark.parametrize("fields, text", [({"width": 101}, "vocabulary, 100"), ({"precision": "fp8"}, "bf16, fp32"), ({"vocab_size": 2**32 + 1}, "32-bit"),
                                          ({"kind": "sampled"}, "fp32 for sampled"), ({"kind": "logits"}, "topk, sampled or hidden")])
def test_payloads_that_cannot_be_right_are_refused(fields, text):
    with pytest.raises(ConfigError, match=text):
        PayloadSpec(**{"kind": "topk", "width": 4, "vocab_size": 100, **fields})


def test_a_payload_of_another_format_is_refused():
    rows = random_rows(5, 4, 100)
    with pytest.raises(CacheCorrupt):
        decode_topk(encode_topk(rows, spec(4, 100, "bf16")), 5, spec(4, 100, "fp32"))
    with pytest.raises(CacheCorrupt):
        decode_topk(encode_topk(rows, spec(4, 100)), 6, spec(4, 100))
    with pytest.raises(CacheCorrupt):
        decode_topk(b"short", 5, spec(4, 100))


@pytest.mark.parametrize("precision, dtype", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_hidden_rows_come_back_bit_for_bit(precision, dtype):
    hidden = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    hidden[0, :3] = torch.tensor([0.0, -0.0, torch.finfo(dtype).max])
    made = spec(64, 100, precision, kind="hidden")
    data, error = encode_hidden(hidden, made)
    got = decode_hidden(data, 33, made)
    assert error == 0.0 and got.dtype == dtype and torch.equal(got.view(torch.uint8), hidden.view(torch.uint8))


def test_fp8_rows_report_the_error_that_they_have():
    """e4m3 has 3 mantissa bits: relative error a value up to 2^-4, root mean square near 2.6 % here; large and tiny rows alike."""
    hidden = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 64)[:, None]
    made = spec(256, 100, "fp8", kind="hidden")
    for row in (0, 31, 63):
        data, error = encode_hidden(hidden[row:row + 1].bfloat16(), made)
        got = decode_hidden(data, 1, made).double()
        exact = hidden[row:row + 1].bfloat16().double()
        measured = ((got - exact).norm() / exact.norm()).item()
        assert abs(measured - error**0.5) < 0.002 and 0.01 < measured < 0.04
    data, error = encode_hidden(torch.zeros(2, 256, dtype=torch.bfloat16), made)
    assert error == 0.0 and torch.equal(decode_hidden(data, 2, made), torch.zeros(2, 256, dtype=torch.bfloat16))


def test_hidden_rows_that_are_not_finite_are_refused():
    with pytest.raises(NonFiniteTeacher):
        encode_hidden(torch.tensor([[1.0, math.inf]]), spec(2, 10, "fp32", kind="hidden"))


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp8"])
def test_hidden_size_estimate_is_an_upper_bound_within_a_third(precision):
    hidden = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 2
    measured = len(encode_hidden(hidden, spec(512, 10, precision, kind="hidden"))[0]) / 256
    estimate = sizes.hidden_bytes_per_token(512, precision)
    assert measured <= estimate <= 1.34 * measured
