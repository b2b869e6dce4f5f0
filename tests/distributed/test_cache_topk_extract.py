"""Top-K and draws from a sharded head equal the dense distribution, whatever the sharding."""

import pytest
import torch
import torch.distributed as dist

from megatron_kd.errors import VocabMismatch
from megatron_kd.kernels.spec import HeadTransform
from megatron_kd.loss.topk_extract import HeadShard, draw_extract, topk_extract
from megatron_kd.vocab import VocabSpec

TRUE, PADDED, WIDTH, ROWS = 103, 112, 24, 37


def problem(transform=HeadTransform()):
    """(rows, head, bias) with padding rows that would win every top-K if they took part."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(ROWS, WIDTH, generator=generator)
    head = torch.randn(PADDED, WIDTH, generator=generator)
    bias = torch.randn(PADDED, generator=generator)
    head[TRUE:] = 50.0 * rows.mean(0)
    bias[TRUE:] = 1e4
    return rows, head, bias


def dense_log_probs(rows, head, bias, transform):
    """float64 [N, TRUE], written out."""
    logits = (rows.double() @ head[:TRUE].double().t() + bias[:TRUE].double()) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return (logits).log_softmax(1)


def shard(head, bias, transform, tp, rank, padded=PADDED):
    """This rank's rows by token id; the last shards may hold padding only."""
    vocab = VocabSpec(true_size=TRUE, student_padded=padded, teacher_padded=PADDED, tp=tp)
    start, end = vocab.shard_range(rank)
    weight = torch.full((end - start, WIDTH), float("nan"))
    weight[:vocab.num_true(rank)] = head[slice(*vocab.teacher_rows(rank))]
    local_bias = torch.full((end - start,), float("nan"))
    local_bias[:vocab.num_true(rank)] = bias[slice(*vocab.teacher_rows(rank))]
    return HeadShard(weight, start, vocab.num_true(rank), local_bias, transform)


def extract(rank, world, k, padded, transform):
    rows, head, bias = problem()
    local = shard(head, bias, transform, world, rank, padded)
    kept = topk_extract(rows, local, k=k, group=dist.group.WORLD, window_rows=10)
    uniforms = torch.rand(ROWS, 20, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    draws = draw_extract(rows, local, uniforms, group=dist.group.WORLD, window_rows=10)
    return [t.numpy() for t in (*kept, *draws)]


@pytest.mark.parametrize("world, padded", [(1, 112), (2, 112), (3, 111), (4, 208)])
def test_topk_of_a_sharded_head_is_exact(ranks, world, padded):
    """4 shards of 52: the last one holds padding only."""
    for transform in (HeadTransform(), HeadTransform(scale=0.7, softcap=6.0)):
        results = ranks.run(extract, world, k=9, padded=padded, transform=transform)
        want = dense_log_probs(*problem(), transform)
        values, ids = want.topk(9, dim=1)
        for result in results:
            got_ids, got, tail, draw_ids, draw_weights, _ = map(torch.from_numpy, result)
            assert torch.equal(got_ids, ids)
            assert (got.double() - values).abs().max() < 2e-5
            outside = want.exp().scatter(1, ids, 0.0).sum(1)
            assert ((tail.double() - outside).abs() / outside).max() < 2e-5
            check_draws(draw_ids, draw_weights, want)


def check_draws(ids, weights, want):
    """Distinct ids whose weights sum to 1, and the draws are those of the inverse transform over ids in order."""
    assert all(len(set(row)) == 20 for row in ids.tolist()) and int(ids.max()) < TRUE
    assert torch.allclose(weights.exp().sum(1), torch.ones(ROWS), atol=1e-6)
    uniforms = torch.rand(ROWS, 20, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    draws = torch.searchsorted(want.exp().cumsum(1), uniforms, right=True).clamp(max=TRUE - 1)
    counts = torch.zeros(ROWS, TRUE).scatter_add(1, draws, torch.full((ROWS, 20), 1 / 20))
    dense = torch.zeros(ROWS, TRUE).scatter_add(1, ids, weights.exp())
    differing_rows = ((dense - counts).abs() > 1e-6).any(1).sum()
    assert differing_rows <= 1, "more than a rounding at one boundary"


def test_k_of_the_whole_vocabulary_leaves_no_tail():
    rows, head, bias = problem()
    kept = topk_extract(rows, shard(head, bias, HeadTransform(), 1, 0), k=TRUE)
    assert torch.equal(kept.tail_N, torch.zeros(ROWS))
    dense = torch.empty(ROWS, TRUE).scatter(1, kept.ids_NK, kept.log_probs_NK)
    assert (dense.double() - dense_log_probs(rows, head, bias, HeadTransform())).abs().max() < 2e-5


def test_small_tails_keep_their_digits():
    """A tail of 1e-12 is a sum of small terms; 1 - sum would be 0 or noise of 1e-7."""
    rows, head, bias = problem()
    bias[7] = 60.0
    kept = topk_extract(rows, shard(head, bias, HeadTransform(), 1, 0), k=3)
    want = dense_log_probs(rows, head, bias, HeadTransform()).exp().scatter(1, kept.ids_NK, 0.0).sum(1)
    assert want.max() < 1e-6 and want.min() > 0
    assert ((kept.tail_N.double() - want).abs() / want).max() < 1e-4


def test_k_above_the_vocabulary_is_refused():
    rows, head, bias = problem()
    with pytest.raises(VocabMismatch, match="at most the vocabulary, 103"):
        topk_extract(rows, shard(head, bias, HeadTransform(), 1, 0), k=TRUE + 1)


def test_expected_draws_give_the_full_distribution():
    """Mean of 4,000 independent draws of 8 tokens: within 5 standard errors of the probabilities."""
    rows, head, bias = problem()
    local = shard(head * 0.2, bias * 0.2, HeadTransform(), 1, 0)
    repeats = 4000
    uniforms = torch.rand(repeats, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept = draw_extract(rows[:1].expand(repeats, -1), local, uniforms, window_rows=1000)
    mean = torch.zeros(TRUE, dtype=torch.float64).scatter_add(0, kept.ids_NK.flatten(), kept.log_probs_NK.exp().double().flatten()) / repeats
    want = dense_log_probs(rows[:1], head * 0.2, bias * 0.2, HeadTransform()).exp()[0]
    error = (want * (1 - want) / (8 * repeats)).sqrt()
    assert ((mean - want).abs() / error).max() < 5
    assert torch.allclose(mean.sum(), torch.tensor(1.0, dtype=torch.float64))
