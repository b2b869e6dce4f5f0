"""What the hook reads off an output layer: its logit scale and soft-cap, or a refusal by name where it could lose something."""

from types import SimpleNamespace

import pytest

from megatron_kd.errors import UnsupportedLayout
from megatron_kd.kernels.spec import HeadTransform
from megatron_kd.mcore.output_layer import check_output_layer, head_transform


def model(layer_class: str, *bases: type, own_forward: bool = True, **config):
    """A language model as far as its output layer goes."""
    layer = type(layer_class, bases, {"forward": lambda self: None} if own_forward else {})()
    return SimpleNamespace(output_layer=layer, config=SimpleNamespace(**config))


@pytest.mark.parametrize("lm, transform", [
    (model("ColumnParallelLinear"), HeadTransform()),
    (model("TEColumnParallelLinear", use_mup=False, mup_output_mult=0.5), HeadTransform()),
    (model("ColumnParallelLinear", use_mup=True, mup_output_mult=0.25), HeadTransform(scale=0.25)),
    (model("Gemma2OutputLayer", final_logit_softcapping=30.0), HeadTransform(softcap=30.0)),
    (model("Gemma4OutputLayer", final_logit_softcapping=None), HeadTransform()),
    (model("Renamed", type("ColumnParallelLinear", (), {"forward": lambda self: None}), own_forward=False), HeadTransform()),
])
def test_known_layers_give_their_transform(lm, transform):
    assert head_transform(lm) == transform


@pytest.mark.parametrize("lm, text", [
    (model("Fp8Head"), "output_layer = 'Fp8Head'"),
    (model("LoRALinear", type("ColumnParallelLinear", (), {"forward": lambda self: None})), "output_layer = 'LoRALinear'"),
    (model("Gemma2OutputLayer", final_logit_softcapping=30.0, use_mup=True, mup_output_mult=0.5), "output_layer = 'Gemma2OutputLayer'"),
    (model("ColumnParallelLinear", defer_embedding_wgrad_compute=True), "defer_embedding_wgrad_compute"),
])
def test_what_could_be_lost_is_refused_by_name(lm, text):
    with pytest.raises(UnsupportedLayout, match=text):
        check_output_layer(lm)


def test_a_head_that_is_sharded_again_is_refused():
    lm = model("ColumnParallelLinear")
    lm.output_layer.gtp_remat_size = 2
    with pytest.raises(UnsupportedLayout, match="gtp_remat_size"):
        check_output_layer(lm)
