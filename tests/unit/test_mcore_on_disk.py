"""Weights in a scratch file: no name on the disk, room reserved at once, small parameters and every attribute kept."""

from pathlib import Path

import pytest
import torch

from megatron_kd.errors import ConvertError
from megatron_kd.mcore.on_disk import move_to_file


def file_mappings() -> list[str]:
    """The mappings of this process onto files that have no name any more."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("(deleted)")]


def test_large_parameters_lie_in_a_file_without_a_name(tmp_path):
    model = torch.nn.ModuleDict({"big": torch.nn.Linear(300, 500), "odd": torch.nn.Linear(333, 101).bfloat16()})
    parameters, bias = dict(model.named_parameters()), model["big"].bias.clone()
    model["big"].weight.tensor_model_parallel = True
    move_to_file([model], tmp_path)
    assert list(tmp_path.iterdir()) == [], "kill -9 leaves nothing"
    assert sum(str(tmp_path) in line for line in file_mappings()) == 1
    assert dict(model.named_parameters()).keys() == parameters.keys() and all(p is parameters[name] for name, p in model.named_parameters())
    assert model["big"].weight.tensor_model_parallel and torch.equal(model["big"].bias, bias)
    for name, shape in (("big", (500, 300)), ("odd", (101, 333))):
        weight = model[name].weight
        assert weight.shape == shape and not weight.any() and weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    with torch.no_grad():
        model["big"].weight.fill_(1.0), model["odd"].weight.fill_(2.0)
    assert (model["big"].weight == 1.0).all() and (model["odd"].weight == 2.0).all()
    del model, parameters, weight
    assert not any(str(tmp_path) in line for line in file_mappings())


def test_small_models_and_other_devices_are_left_alone(tmp_path):
    small, elsewhere = torch.nn.Linear(8, 8), torch.nn.Linear(300, 500, device="meta")
    kept = small.weight.clone()
    move_to_file([small, elsewhere], tmp_path)
    assert torch.equal(small.weight, kept) and elsewhere.weight.device.type == "meta"


def test_a_disk_too_small_for_the_scratch_file_is_named_at_once(tmp_path, small_disk):
    with small_disk(tmp_path, "1m"):
        with pytest.raises(ConvertError, match="scratch space.*No space left.*--scratch"):
            move_to_file([torch.nn.Linear(1024, 512)], tmp_path)
        assert list(tmp_path.iterdir()) == []
