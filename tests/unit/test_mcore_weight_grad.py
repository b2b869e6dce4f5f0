"""Delivery of the head's weight gradient follows Megatron's main_grad contract in each of its cases."""

import pytest
import torch

from megatron_kd.mcore.weight_grad import head_gradient

C = torch.tensor(0.37)


def weight_of(dtype=torch.float32, main_grad=torch.float32, **attributes):
    weight = torch.nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    if main_grad is not None:
        weight.main_grad = torch.ones(3, 2, dtype=main_grad)
    for name, value in attributes.items():
        setattr(weight, name, value)
    return weight


def deliver(weight, also_embeds=False):
    """(what autograd gets, c * dW as it should be)."""
    gradient = head_gradient(weight, also_embeds)
    buffer = gradient.acquire(weight)
    buffer.copy_(torch.arange(6.0).view(3, 2))
    expected = buffer * C
    return gradient.deliver(buffer, C, weight.dtype), expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_is_added_to_and_the_dummy_is_not(dtype):
    weight = weight_of(dtype)
    dummy, expected = deliver(weight)
    torch.testing.assert_close(weight.main_grad, 1 + expected)
    assert weight.grad_added_to_main_grad and dummy.shape == weight.shape and dummy.dtype == dtype


def test_a_bf16_main_grad_gets_the_sum_in_its_dtype():
    weight = weight_of(torch.bfloat16, torch.bfloat16)
    _, expected = deliver(weight)
    torch.testing.assert_close(weight.main_grad, (1 + expected).bfloat16(), rtol=1e-2, atol=1e-2)


def test_zeros_where_megatron_adds_the_dummy():
    weight = weight_of(zero_out_wgrad=True)
    dummy, expected = deliver(weight, also_embeds=True)
    assert not dummy.any()
    torch.testing.assert_close(weight.main_grad, 1 + expected)


@pytest.mark.parametrize("case", [dict(main_grad=None), dict(__fsdp_param__=True)])
def test_autograd_gets_the_gradient_without_that_contract(case):
    weight = weight_of(**case)
    grad, expected = deliver(weight)
    torch.testing.assert_close(grad, expected)
    assert not getattr(weight, "grad_added_to_main_grad", False)


def test_an_embedding_that_megatron_did_not_announce_goes_through_autograd():
    weight = weight_of()
    grad, expected = deliver(weight, also_embeds=True)
    torch.testing.assert_close(grad, expected)
    assert bool((weight.main_grad == 1).all())
