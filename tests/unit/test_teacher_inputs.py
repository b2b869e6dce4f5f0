"""What a teacher gives its forward: its own tokens and positions cut once under context parallelism, no output layer."""

from types import SimpleNamespace

import pytest
import torch

from megatron_kd.mcore import slices
from megatron_kd.rows import TokenBlock
from megatron_kd.teacher.forward import _inputs


def first_half(fields, cu_seqlens, group):
    return {name: value[:, :value.shape[1] // 2] for name, value in fields.items()}


@pytest.mark.parametrize("kind, packed, num_positions", [("rope", False, 4), ("mrope", False, 8), ("mrope", True, 4)])
def test_positions_are_cut_once(monkeypatch, kind, packed, num_positions):
    monkeypatch.setattr(slices, "local_slice", first_half)
    monkeypatch.setattr(slices, "packed_params", lambda cu_seqlens, device: cu_seqlens)
    lm = SimpleNamespace(position_embedding_type=kind, pg_collection=SimpleNamespace(cp=None))
    block = TokenBlock(tokens_bs=torch.arange(8)[None], loss_mask_bs=torch.ones(1, 8), cu_seqlens=torch.tensor([0, 4, 8], dtype=torch.int32) if packed else None,
                       step=0, micro_batch=0)
    inputs = _inputs(lm, block, torch.device("cpu"))
    assert inputs.tokens_bt.tolist() == [[0, 1, 2, 3]]
    assert inputs.position_ids.shape == (1, num_positions)


@pytest.mark.parametrize("tied", [False, True])
def test_output_layer_is_gone_before_the_warm_up_unless_it_is_the_embedding(monkeypatch, tied):
    from megatron_kd.teacher import serve

    lm = SimpleNamespace(post_process=True, share_embeddings_and_output_weights=tied, output_layer=SimpleNamespace(weight="head"))
    seen = []
    monkeypatch.setattr(serve, "warm_up", lambda model, sequence_length: seen.append((model.output_layer.weight, sequence_length)))
    monkeypatch.setattr(serve, "Server", lambda *_, **__: SimpleNamespace(run=lambda *_, **__: seen.append("served")))
    serve.serve(lm, SimpleNamespace(agreement=None), lambda: None, stop=lambda: True, warm_up_length=64)
    assert seen == [("head" if tied else None, 64), "served"]
