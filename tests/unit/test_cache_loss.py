"""From the cache into the loss: what was stored trains as what was computed."""

import pytest
import torch

from megatron_kd.cache.codec import TopKRows, encode_hidden, encode_topk
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.segments import split
from megatron_kd.cache.storage import Storage
from megatron_kd.cache.writer import CacheWriter
from megatron_kd.loss.fused import fused_linear_kd
from megatron_kd.loss.objective import Objective
from megatron_kd.loss.signals import HiddenTeacher, TopKTeacher
from megatron_kd.loss.topk_extract import HeadShard, draw_extract, topk_extract
from megatron_kd.vocab import VocabSpec
from tests import cache_samples as samples

VOCAB, WIDTH, TEACHER_WIDTH, LENGTH = 61, 10, 14, 11
SPEC = VocabSpec(true_size=VOCAB, student_padded=64, teacher_padded=VOCAB)


def problem(dtype=torch.float64, scale=1.0):
    """Student rows and head, teacher rows and head, for one sequence."""
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).mul(scale).to(dtype)  # noqa: E731
    return make(LENGTH, WIDTH), make(64, WIDTH) * 0.5, make(LENGTH, TEACHER_WIDTH), make(VOCAB, TEACHER_WIDTH)


def through_cache(path, kept=None, hidden=None, **fields):
    """What a reader returns for one sequence whose teacher rows are given."""
    asked = samples.block(torch.arange(LENGTH)[None])
    made = samples.collection(vocab_size=VOCAB, **fields)
    storage = Storage(str(path))
    with CacheWriter(storage, made) as writer:
        segment = next(split(asked))
        payload, error = encode_hidden(hidden, made.spec) if kept is None else (encode_topk(TopKRows(*kept), made.spec), 0.0)
        writer.add(segment.key, segment.prefix, LENGTH, segment.asked, payload, error)
    with CacheReader(storage, made) as reader:
        return reader.read(asked).rows


def run(student, head, teacher, **objective):
    """(kd_N, dX, dW) with upstream gradients that are not 1."""
    student, head = student.clone().requires_grad_(), head.clone().requires_grad_()
    out = fused_linear_kd(student, head, teacher, vocab=SPEC, objective=Objective(**objective))
    (out.loss_N * 0.37).sum().backward()
    return out, student.grad, head.grad


def top_k(rows) -> TopKTeacher:
    return TopKTeacher(ids_NK=rows.ids_NK, log_probs_NK=rows.log_probs_NK.double(), tail_N=rows.tail_N.double())


def test_all_tokens_in_fp32_are_the_dense_loss(tmp_path):
    """K = V: loss and both gradients to 1e-6."""
    student, head, teacher_rows, teacher_head = problem()
    kept = topk_extract(teacher_rows, HeadShard(teacher_head, 0, VOCAB), k=VOCAB)
    rows = through_cache(tmp_path, kept, width=VOCAB, precision="fp32")
    dense = run(student, head, HiddenTeacher(rows_NH=teacher_rows, head_VH=teacher_head))
    for mode in ("tail_bucket", "none", "renormalise"):
        cached = run(student, head, top_k(rows), top_k_mode=mode)
        assert (cached[0].kd_N - dense[0].kd_N).abs().max() < 1e-6
        for ours, theirs in zip(cached[1:], dense[1:]):
            assert (ours - theirs).abs().max() < 1e-6 and torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 1 - 1e-9


@pytest.mark.parametrize("case", ["usual", "student has more mass on K", "no tail"])
def test_the_bucket_loss_of_stored_rows_is_a_divergence_with_the_right_gradient(tmp_path, case):
    """KL over K + 1 outcomes: not negative, and its gradient agrees with finite differences in size and direction."""
    student, head, teacher_rows, teacher_head = problem()
    kept = topk_extract(teacher_rows, HeadShard(teacher_head, 0, VOCAB), k=5)
    if case == "student has more mass on K":
        student, head = student * 0, head * 0  # uniform
        head[kept.ids_NK[:, 0].unique()] += 1e-3
        kept = kept._replace(log_probs_NK=kept.log_probs_NK - 6.0, tail_N=1 - (kept.log_probs_NK - 6.0).exp().sum(1))
    elif case == "no tail":
        kept = kept._replace(log_probs_NK=kept.log_probs_NK.log_softmax(1), tail_N=torch.zeros(LENGTH))
    rows = through_cache(tmp_path, kept, width=5, precision="bf16")
    teacher = top_k(rows)
    out, dx, _ = run(student, head, teacher)
    assert (out.kd_N >= 0).all() and torch.isfinite(out.kd_N).all()
    if case == "student has more mass on K":
        assert (out.student_kept_N > out.teacher_kept_N).all() and out.kd_N.min() > 1e-4
    direction = torch.randn(student.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    step = 1e-5
    loss = lambda x: fused_linear_kd(x, head, teacher, vocab=SPEC, objective=Objective()).loss_N.sum() * 0.37  # noqa: E731
    finite = (loss(student + step * direction) - loss(student - step * direction)) / (2 * step)
    assert torch.allclose((dx * direction).sum(), finite, rtol=1e-4, atol=1e-8)


def test_draws_are_unbiased_where_top_k_is_not(tmp_path):
    """Mean gradient over 500 stored draws of 6 tokens: within 5 standard errors of the dense one; top-6 with its K alone is far from it."""
    student, head, teacher_rows, teacher_head = problem(scale=0.5)
    _, dense, _ = run(student, head, HiddenTeacher(rows_NH=teacher_rows, head_VH=teacher_head))
    shard, generator, gradients = HeadShard(teacher_head, 0, VOCAB), torch.Generator().manual_seed(2), []
    for index in range(500):
        kept = draw_extract(teacher_rows, shard, torch.rand(LENGTH, 6, generator=generator, dtype=torch.float64))
        rows = through_cache(tmp_path / "once", kept, width=6, precision="fp32", kind="sampled") if index == 0 else None
        if rows is not None:
            order = kept.ids_NK.argsort(dim=1)
            assert torch.equal(rows.ids_NK, kept.ids_NK.gather(1, order)) and torch.equal(rows.log_probs_NK, kept.log_probs_NK.gather(1, order))
        teacher = TopKTeacher(ids_NK=kept.ids_NK, log_probs_NK=kept.log_probs_NK.double(), tail_N=kept.tail_N.double())
        gradients.append(run(student, head, teacher, top_k_mode="none")[1])
    stacked = torch.stack(gradients)
    error = stacked.std(0) / len(gradients) ** 0.5
    assert ((stacked.mean(0) - dense).abs() / error).max() < 5
    best = topk_extract(teacher_rows, shard, k=6)
    biased = run(student, head, TopKTeacher(ids_NK=best.ids_NK, log_probs_NK=best.log_probs_NK.double(), tail_N=best.tail_N.double()), top_k_mode="renormalise")[1]
    assert (biased - dense).norm() > 5 * (stacked.mean(0) - dense).norm()


@pytest.mark.parametrize("mode", ["tail_bucket", "none"])
def test_rows_without_teacher_mass_have_no_kd_and_no_gradient(tmp_path, mode):
    """What ce_only relies on."""
    student, head, teacher_rows, teacher_head = problem()
    kept = topk_extract(teacher_rows, HeadShard(teacher_head, 0, VOCAB), k=5)
    full = top_k(through_cache(tmp_path, kept, width=5, precision="fp32"))
    missing = torch.zeros(LENGTH, dtype=torch.bool)
    missing[3:6] = True
    teacher = TopKTeacher(ids_NK=torch.where(missing[:, None], torch.arange(5), full.ids_NK), log_probs_NK=full.log_probs_NK.masked_fill(missing[:, None], float("-inf")),
                          tail_N=full.tail_N.masked_fill(missing, 0.0))
    out, dx, _ = run(student, head, teacher, top_k_mode=mode)
    whole, dx_whole, _ = run(student, head, full, top_k_mode=mode)
    assert torch.equal(out.kd_N[missing], torch.zeros(3, dtype=torch.float64)) and torch.equal(dx[missing], torch.zeros(3, WIDTH, dtype=torch.float64))
    assert torch.allclose(out.kd_N[~missing], whole.kd_N[~missing]) and torch.allclose(dx[~missing], dx_whole[~missing])


def test_stored_hidden_rows_are_the_online_loss_bit_for_bit(tmp_path):
    student, head, teacher_rows, teacher_head = problem(torch.bfloat16)
    rows = through_cache(tmp_path, hidden=teacher_rows, kind="hidden", width=TEACHER_WIDTH, precision="bf16")
    online, cached = (run(student, head, HiddenTeacher(rows_NH=r, head_VH=teacher_head)) for r in (teacher_rows, rows.hidden_NH))
    assert torch.equal(online[0].kd_N, cached[0].kd_N) and torch.equal(online[1], cached[1]) and torch.equal(online[2], cached[2])
