"""Stacked experts beside Transformer Engine's grouped linear layer on a GPU: the same layer, each against float64."""

import importlib.util

import pytest
import torch

from megatron_kd.mcore.experts import can_stack, stack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
              pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")]


@pytest.mark.parametrize(("num_experts", "width_in", "width_out", "num_rows"), [(256, 2048, 1024, 65536), (64, 512, 2048, 1000), (8, 136, 72, 333), (4, 64, 64, 0)])
def test_stacked_experts_answer_as_transformer_engine_does(num_experts, width_in, width_out, num_rows):
    from transformer_engine.pytorch import GroupedLinear

    generator = torch.Generator("cuda").manual_seed(1)
    layer = GroupedLinear(num_experts, width_in, width_out, bias=False, params_dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    rows = torch.randn(num_rows, width_in, generator=generator, device="cuda").bfloat16()
    shares = torch.rand(num_experts, generator=generator, device="cuda").pow(3)
    shares[1] = 0.0  # an expert without a row
    splits = torch.bincount(torch.multinomial(shares, num_rows, replacement=True, generator=generator), minlength=num_experts).tolist() if num_rows else [0] * num_experts
    assert 0 in splits
    with torch.no_grad():
        theirs = layer(rows, splits) if num_rows else rows.new_empty(0, width_out)
        exact = torch.cat([part.double() @ getattr(layer, f"weight{i}").double().t() for i, part in enumerate(rows.split(splits))])
    assert can_stack(layer)
    stack(layer)
    ours, bias = layer(rows, splits)
    assert bias is None and ours.shape == theirs.shape == exact.shape and ours.dtype == torch.bfloat16
    if num_rows:
        error, theirs_error = ((answer.double() - exact).norm() / exact.norm() for answer in (ours, theirs))
        assert error < 1.05 * theirs_error + 1e-6, (error, theirs_error)
        assert error < 3e-3
