"""What attach sets on a user's configuration."""

from types import SimpleNamespace

import pytest

from megatron_kd.errors import UnsupportedLayout
from megatron_kd.mcore import configure


@pytest.mark.parametrize("kernel", [True, False])
def test_weight_gradients_are_fused_only_where_the_output_layer_can(monkeypatch, kernel):
    monkeypatch.setattr(configure, "has_fused_weight_gradient", lambda: kernel)
    monkeypatch.setattr(configure, "tolerate_missing_makefile", lambda: None)
    cfg = SimpleNamespace(model=SimpleNamespace(gradient_accumulation_fusion=True, post_wrap_hooks=[]), ddp=SimpleNamespace(average_in_collective=True))
    configure.configure(cfg)
    assert cfg.model.gradient_accumulation_fusion is kernel
    assert cfg.model.calculate_per_token_loss and not cfg.ddp.average_in_collective


def test_evaluation_keeps_the_context_parallel_ranks_of_training():
    model = SimpleNamespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=2, sequence_parallel=False)
    cfg = SimpleNamespace(model=model, ddp=SimpleNamespace(), dist=SimpleNamespace(eval_context_parallel_size=2))
    configure._check_layout(cfg, model)
    cfg.dist.eval_context_parallel_size = 1
    with pytest.raises(UnsupportedLayout, match="eval_context_parallel_size"):
        configure._check_layout(cfg, model)
