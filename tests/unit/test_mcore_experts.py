"""A frozen model's experts as one tensor: same answers, same parameters, one product; and which layers are left alone."""

from types import SimpleNamespace

import pytest
import torch

from megatron_kd.mcore.experts import can_stack, experts_stacked, names_of, stack

NUM_EXPERTS, WIDTH_IN, WIDTH_OUT = 5, 16, 24


def weights_of(layer):
    return [getattr(layer, name) for name in names_of(layer)]


class GroupedLinear(torch.nn.Module):
    """What Transformer Engine's layer looks like from outside: a [O, I] parameter an expert, a loop over experts."""

    def __init__(self, *, num_gemms=NUM_EXPERTS, bias=False, dtype=torch.bfloat16, width=WIDTH_IN, fp8=None):
        super().__init__()
        self.num_gemms, self.use_bias, self.config = num_gemms, bias, SimpleNamespace(fp8=fp8)
        generator = torch.Generator().manual_seed(4)
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.randn(WIDTH_OUT, width, generator=generator).to(dtype)))

    def forward(self, rows_NI, rows_per_expert):
        return torch.cat([part @ weight.t() for part, weight in zip(rows_NI.split(list(rows_per_expert)), weights_of(self))]), None


class Experts(torch.nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.linear_fc1 = GroupedLinear(**kwargs)
        self.empty = None


def rows(splits):
    return torch.randn(sum(splits), WIDTH_IN, generator=torch.Generator().manual_seed(5)).bfloat16()


@pytest.mark.parametrize("splits", [[3, 0, 4, 1, 2], [0, 0, 0, 0, 7], [1, 1, 1, 1, 1], [9, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
def test_stacked_experts_answer_as_single_ones_do(splits):
    single = GroupedLinear()
    with experts_stacked():
        experts = Experts()
    assert "forward" in vars(experts.linear_fc1) and "forward" not in vars(Experts().linear_fc1), "only what is built inside"
    wanted, none = single(rows(splits), splits)
    answer, bias = experts.linear_fc1(rows(splits), splits)
    assert none is bias is None and answer.shape == wanted.shape and answer.dtype == torch.bfloat16
    assert torch.allclose(answer.double(), wanted.double(), rtol=1e-2, atol=1e-2)


def test_parameters_keep_names_and_values_and_share_one_tensor():
    layer = GroupedLinear()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    stack(layer)
    after = layer.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert len({weight.untyped_storage().data_ptr() for weight in weights_of(layer)}) == 1


def test_weights_that_are_loaded_later_are_used():
    splits = [2] * NUM_EXPERTS
    with experts_stacked():
        layer = Experts().linear_fc1
    layer.load_state_dict({name: value + 1 for name, value in layer.state_dict().items()})
    single = GroupedLinear()
    single.load_state_dict(layer.state_dict())
    assert torch.allclose(layer(rows(splits), splits)[0].double(), single(rows(splits), splits)[0].double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("which", [range(NUM_EXPERTS), [0], [2], [NUM_EXPERTS - 1]])
def test_weights_that_got_other_memory_are_stacked_again(which):
    """As .to(), .cuda() and load_state_dict(assign=True) do."""
    splits = [2] * NUM_EXPERTS
    with experts_stacked():
        layer = Experts().linear_fc1
    for i in which:
        layer.register_parameter(f"weight{i}", torch.nn.Parameter(weights_of(layer)[i].detach() * 2, requires_grad=False))
    single = GroupedLinear()
    single.load_state_dict(layer.state_dict())
    assert torch.allclose(layer(rows(splits), splits)[0].double(), single(rows(splits), splits)[0].double(), rtol=1e-2, atol=1e-2)
    assert len({weight.untyped_storage().data_ptr() for weight in weights_of(layer)}) == 1


@pytest.mark.parametrize("kwargs", [{"bias": True}, {"dtype": torch.float32}, {"dtype": torch.float16}, {"width": 12}, {"fp8": "hybrid"}, {"num_gemms": 0}])
def test_other_layers_are_left_alone(kwargs):
    assert not can_stack(GroupedLinear(**kwargs))
    with experts_stacked():
        assert "forward" not in vars(Experts(**kwargs).linear_fc1)


@pytest.mark.parametrize(("capability", "wanted"), [((8, 0), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_on_gpus_only_hopper_stacks(monkeypatch, capability, wanted):
    layer = GroupedLinear()
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert can_stack(layer) == wanted


def test_linear_layers_and_nothing_are_left_alone():
    assert not can_stack(torch.nn.Linear(16, 16, dtype=torch.bfloat16)) and not can_stack(None) and can_stack(GroupedLinear())


def test_the_hook_goes_when_building_fails():
    with pytest.raises(RuntimeError), experts_stacked():
        raise RuntimeError
    assert "forward" not in vars(Experts().linear_fc1)


@pytest.mark.parametrize("asked", [True, False])
def test_a_frozen_model_is_built_with_stacked_experts_unless_its_weights_move_on(asked):
    from megatron_kd.mcore.model import build_model

    provider = SimpleNamespace(provide_distributed_model=lambda **_: [Experts()])
    (chunk,) = build_model(provider, stack_experts=asked)
    assert ("forward" in vars(chunk.linear_fc1)) == asked
    assert not any(parameter.requires_grad for parameter in chunk.parameters()) and not chunk.training
