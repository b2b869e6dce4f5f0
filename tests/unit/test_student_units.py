"""The token count in finer units than rows is for models whose whole loss it divides."""

from types import SimpleNamespace

import pytest

from megatron_kd.student.engine import Engine


@pytest.mark.parametrize("settings, units", [({}, 1024), ({"seq_length": 1 << 16, "batch": 1 << 8}, 64), ({"num_moe_experts": 4}, 1), ({"mtp_num_layers": 1}, 1)])
def test_units_of_a_weight(settings, units):
    batch = settings.pop("batch", 8)
    cfg = SimpleNamespace(model=SimpleNamespace(**{"seq_length": 128, **settings}), train=SimpleNamespace(global_batch_size=batch))
    assert Engine(cfg, None)._weight_units == units
