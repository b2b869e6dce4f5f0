"""Top-K and draws from a bf16 head on the GPU against fp64."""

import pytest
import torch

from megatron_kd.kernels.spec import HeadTransform
from megatron_kd.loss.topk_extract import HeadShard, draw_extract, topk_extract

pytestmark = pytest.mark.gpu


def test_top_100_of_a_large_vocabulary_is_exact_up_to_the_projection():
    """fp32 logits of bf16 inputs: log-probabilities and tail within 1e-4 of fp64, kept ids those of fp64 except at ties of that size."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = torch.randn(300, 256, device="cuda", generator=generator).bfloat16()
    head = torch.randn(248_320, 256, device="cuda", generator=generator).mul_(0.2).bfloat16()
    kept = topk_extract(rows, HeadShard(head, 0, 248_077, None, HeadTransform()), k=100, window_rows=128)
    want = torch.cat([(part.double() @ head[:248_077].double().t()).log_softmax(1) for part in rows.split(50)])
    values, _ = want.topk(100, dim=1)
    assert int(kept.ids_NK.max()) < 248_077 and all(len(set(ids)) == 100 for ids in kept.ids_NK.tolist())
    assert (kept.log_probs_NK.double() - values).abs().max() < 1e-4
    assert (want.gather(1, kept.ids_NK) - kept.log_probs_NK.double()).abs().max() < 1e-4
    outside = want.exp().scatter(1, kept.ids_NK, 0.0).sum(1)
    assert ((kept.tail_N.double() - outside).abs() / outside).max() < 1e-3


def test_draws_follow_the_distribution():
    """100,000 draws of one row over 50 tokens: every frequency within 5 standard errors."""
    rows = torch.ones(1, 1, device="cuda").bfloat16().expand(2000, 1)
    head = torch.linspace(-2, 2, 50, device="cuda")[:, None].bfloat16()
    uniforms = torch.rand(2000, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[:, :50]
    kept = draw_extract(rows, HeadShard(head, 0, 50), uniforms)
    mean = torch.zeros(50, device="cuda").scatter_add(0, kept.ids_NK.flatten(), kept.log_probs_NK.exp().flatten()) / 2000
    want = head[:, 0].double().softmax(0)
    error = (want * (1 - want) / 100_000).sqrt()
    assert ((mean.double() - want).abs() / error).max() < 5
