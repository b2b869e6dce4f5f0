"""The term on hidden states: values, gradients and the projection's, against plain autograd over all rows at once."""

import pytest
import torch

from megatron_kd.errors import ConfigError
from megatron_kd.loss import hidden_term
from megatron_kd.loss.hidden_term import HiddenTerm


def dense(kind: str, x, t, projection):
    """The definition, in float64 with plain autograd."""
    a = x if projection is None else x @ projection.t()
    return 1 - torch.nn.functional.cosine_similarity(a, t) if kind == "cosine" else (a - t).square().mean(1)


@pytest.mark.parametrize("width_t", [6, 9])
@pytest.mark.parametrize("kind", ["cosine", "mse"])
def test_values_and_gradients_equal_plain_autograd(kind, width_t, monkeypatch):
    monkeypatch.setattr(hidden_term, "WINDOW_ROWS", 4)
    gen = torch.Generator().manual_seed(1)
    x, t = torch.randn(11, 6, generator=gen, dtype=torch.float64).requires_grad_(), torch.randn(11, width_t, generator=gen, dtype=torch.float64)
    term = HiddenTerm(kind, 6, width_t, dtype=torch.float64)
    assert (term.projection is None) == (width_t == 6)
    weights = torch.rand(11, generator=gen, dtype=torch.float64)
    value = term(x, t)
    (0.37 * weights * value).sum().backward()
    twin_x = x.detach().clone().requires_grad_()
    twin_p = None if term.projection is None else term.projection.detach().clone().requires_grad_()
    want = dense(kind, twin_x, t, twin_p)
    (0.37 * weights * want).sum().backward()
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(x.grad, twin_x.grad)
    if twin_p is not None:
        torch.testing.assert_close(term.projection.grad, twin_p.grad)


def test_bf16_projection_gradient_is_summed_in_float32(monkeypatch):
    monkeypatch.setattr(hidden_term, "WINDOW_ROWS", 2)
    gen = torch.Generator().manual_seed(2)
    x, t = torch.randn(400, 8, generator=gen).bfloat16(), torch.randn(400, 12, generator=gen).bfloat16()
    term = HiddenTerm("mse", 8, 12, dtype=torch.bfloat16)
    term(x, t).sum().backward()
    exact = term.projection.detach().double().requires_grad_()
    dense("mse", x.double(), t.double(), exact).sum().backward()
    error = (term.projection.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 2 * torch.finfo(torch.bfloat16).eps


def test_equal_projections_on_every_rank_without_touching_the_random_state():
    before = torch.get_rng_state()
    first, second = HiddenTerm("cosine", 6, 9), HiddenTerm("cosine", 6, 9, sequence_parallel=True)
    assert torch.equal(first.projection, second.projection) and torch.equal(before, torch.get_rng_state())
    assert second.projection.sequence_parallel and not first.projection.sequence_parallel


def test_no_rows_and_bad_input():
    term = HiddenTerm("cosine", 6, 9)
    term(torch.zeros(0, 6).requires_grad_(), torch.zeros(0, 9)).sum().backward()
    assert not term.projection.grad.any()
    with pytest.raises(ConfigError, match="width 9"):
        term(torch.zeros(2, 6), torch.zeros(2, 6))
    with pytest.raises(ConfigError, match="2 rows"):
        term(torch.zeros(2, 6), torch.zeros(3, 9))
    with pytest.raises(ConfigError, match="kind"):
        HiddenTerm("l1", 6, 9)
