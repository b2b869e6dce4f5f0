"""What attach sets on a user's configuration."""

from types import SimpleNamespace

import pytest

from megatron_kd.mcore import configure


@pytest.mark.parametrize("kernel", [True, False])
def test_weight_gradients_are_fused_only_where_the_output_layer_can(monkeypatch, kernel):
    monkeypatch.setattr(configure, "has_fused_weight_gradient", lambda: kernel)
    monkeypatch.setattr(configure, "tolerate_missing_makefile", lambda: None)
    cfg = SimpleNamespace(model=SimpleNamespace(gradient_accumulation_fusion=True), ddp=SimpleNamespace(average_in_collective=True))
    configure.configure(cfg)
    assert cfg.model.gradient_accumulation_fusion is kernel
    assert cfg.model.calculate_per_token_loss and not cfg.ddp.average_in_collective
