"""The planner's memory forms against tiny Megatron models on the CPU: state to the byte, activations by the storages that autograd keeps, a frozen
teacher's experts by tracked allocations."""

import pytest

from tests.unit.test_plan_models import GPT_OSS, LLAMA, QWEN35, QWEN35_MOE

SEQ, BATCH = 128, 2
CONFIGS = {"llama": LLAMA, "gpt_oss": GPT_OSS, "qwen35": QWEN35, "qwen35_moe": QWEN35_MOE}
# what a layout proves: tensor-parallel shares with sequence parallelism; experts over ranks; pipeline stages with an own head copy; sharded state
CASES = [
    dict(name="llama", tp=1, distributed_optimizer=False),
    dict(name="llama", tp=2, distributed_optimizer=False),
    dict(name="llama", tp=1, distributed_optimizer=True),
    dict(name="llama", pp=2, distributed_optimizer=True),
    dict(name="gpt_oss", ep=2, distributed_optimizer=True),
    dict(name="qwen35", tp=2, distributed_optimizer=True),
    dict(name="qwen35_moe", tp=2, ep=2, distributed_optimizer=False),
]


def measure(rank: int, world: int, cases: list[dict]) -> list[dict]:
    """Bytes of weights, gradients, optimizer state after a step, and of saved activations, on this rank, for each case."""
    from megatron.core import parallel_state

    out = []
    for case in cases:
        out.append(_measure_one(**case))
        parallel_state.destroy_model_parallel()
    return out


def _measure_one(*, name: str, distributed_optimizer: bool, tp: int = 1, pp: int = 1, ep: int = 1) -> dict:
    import torch
    import torch.distributed as dist
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from transformers import AutoConfig

    from megatron_kd.layout import ParallelLayout
    from megatron_kd.mcore.model import language_model, provider_for

    config = dict(CONFIGS[name])
    layout = ParallelLayout.for_world(dist.get_world_size(), tp=tp, pp=pp, ep=ep, etp=1 if "num_experts_per_tok" in config else None,
                                      sequence_parallel=tp > 1)
    provider = provider_for(AutoConfig.for_model(**config), layout=layout, dtype=torch.float32, seq_length=SEQ, load_weights=False,
                            overrides={"mtp_num_layers": None})
    provider.initialize_model_parallel(seed=0)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer)
    chunks = provider.provide_distributed_model(ddp_config=ddp, wrap_with_ddp=True, use_cpu_initialization=True, data_parallel_random_init=False)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, params_dtype=torch.float32,
                                                       use_distributed_optimizer=distributed_optimizer), chunks)
    module, lm = chunks[0], language_model(chunks[0])
    saved = _saved_bytes(lm) if pp == 1 else None
    for buffer in [*module.buffers, *module.expert_parallel_buffers]:
        buffer.grad_data.fill_(1e-3)
    optimizer.step()
    buffers = [*module.buffers, *module.expert_parallel_buffers]
    weights = sum(b.param_data.numel() if b.param_data is not None else sum(p.numel() for p in b.params) for b in buffers) * 4
    state = sum(t.numel() * t.element_size() for t in _optimizer_tensors(optimizer))
    return {"weights": weights, "gradients": sum(b.grad_data.numel() for b in buffers) * 4, "state": state, "saved": saved,
            "stage": dist.get_rank() * pp // dist.get_world_size()}


def _optimizer_tensors(optimizer):
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [value for part in parts if part.optimizer is not None for state in part.optimizer.state.values() for key,
            value in state.items() if key.startswith("exp_avg")]


def _saved_bytes(lm) -> int:
    """Bytes of all storages that autograd keeps between the embedding's output and the head's input."""
    import torch

    own = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(0, 64, (BATCH, SEQ))
    mask = torch.tril(torch.ones(1, 1, SEQ, SEQ)) < 0.5
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = lm(tokens, torch.arange(SEQ).expand(BATCH, SEQ), mask, labels=tokens, output_processor=lambda *, hidden_states, **_: hidden_states)
    total = sum(storage.nbytes() for storage in kept.values())
    out.sum().backward()
    return total


def predicted(case: dict, world: int, stage: int) -> dict:
    """What the planner says about the same rank."""
    from megatron_kd.layout import ParallelLayout
    from megatron_kd.plan.activations import ActivationSpec, final_norm_saved, layer_saved
    from megatron_kd.plan.memory import state_items
    from megatron_kd.plan.models import from_config
    from megatron_kd.plan.params import stage_layers, stage_weights

    model = from_config(CONFIGS[case["name"]], case["name"])
    degrees = {key: case[key] for key in ("tp", "pp", "ep") if key in case}
    layout = ParallelLayout.for_world(world, **degrees, etp=1 if model.moe else None, sequence_parallel=case.get("tp", 1) > 1)
    items = state_items(stage_weights(model, layout, stage), layout, dtype_bytes=4, distributed_optimizer=case["distributed_optimizer"])
    spec = ActivationSpec(tp=layout.tp, sequence_parallel=layout.sequence_parallel, ep=layout.ep, expert_tp=layout.expert_tp, seq=SEQ,
                          micro_batch=BATCH, kernels="torch", dtype_bytes=4,
                          fused_activation=model.fuses_activation)
    saved = (sum(layer_saved(model, layer, spec) for layer in stage_layers(model, layout, stage)) + final_norm_saved(model, spec)) * SEQ * BATCH
    return {"weights": items[0].bytes, "gradients": items[1].bytes, "state": items[2].bytes, "saved": saved}


def test_state_is_exact_and_activations_within_a_twentieth(megatron_ranks):
    results = megatron_ranks.run(measure, 2, timeout_s=120, cases=CASES)
    for number, case in enumerate(CASES):
        for rank in range(2):
            got = results[rank][number]
            want = predicted(case, 2, got["stage"])
            assert (got["weights"], got["gradients"]) == (want["weights"], want["gradients"]), (case, rank, got, want)
            if case["distributed_optimizer"]:  # the shard's padding holds no state
                assert got["state"] <= want["state"] <= 1.01 * got["state"], (case, rank, got, want)
            else:
                assert got["state"] == want["state"], (case, rank, got, want)
            if got["saved"] is not None:
                assert abs(want["saved"] / got["saved"] - 1) < 0.05, (case, rank, want["saved"] / got["saved"])


FROZEN = {**QWEN35_MOE, "hidden_size": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 64}  # every token visits all 8 experts: equal loads


def frozen_experts_peak(rank: int, world: int, config: dict, ep: int) -> tuple[int, list[str]]:
    """(peak bytes inside the layers' experts in a forward without gradient, routing maps that stay afterwards): megatron-core's own dispatcher and
    TEGroupedMLP, around products that only allocate their output (Transformer Engine needs a GPU)."""
    from types import SimpleNamespace

    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from transformers import AutoConfig

    from megatron_kd.cli.allocations import TrackedAllocations
    from megatron_kd.layout import ParallelLayout
    from megatron_kd.mcore.hidden import Inputs, hidden_fwd
    from megatron_kd.mcore.model import ROUTING_MAPS, build_model, language_model, teacher_provider

    class Product(torch.nn.Module):
        def __init__(self, num_experts, width_in, width_out, **_):
            super().__init__()
            self.width_out = width_out

        def forward(self, rows, rows_per_expert):
            return rows.new_empty(len(rows), self.width_out), None

    layout = ParallelLayout.for_world(world, ep=ep, etp=1)
    provider = teacher_provider(AutoConfig.for_model(**config), layout=layout, dtype=torch.bfloat16, seq_length=SEQ, load_weights=False)
    lm = language_model(build_model(provider, seed=0)[0])
    seen, peaks = TrackedAllocations(), []
    for layer in lm.decoder.layers:
        groups = SimpleNamespace(ep=parallel_state.get_expert_model_parallel_group(), expt_tp=parallel_state.get_expert_tensor_parallel_group())
        parts = SimpleNamespace(linear_fc1=Product, linear_fc2=Product, activation_func=None)
        layer.mlp.experts = TEGroupedMLP(config["num_experts"] // ep, layer.mlp.config, parts, groups)
        layer.mlp.register_forward_pre_hook(lambda *_: setattr(seen, "peak_bytes", seen.live_bytes))
        layer.mlp.register_forward_hook(lambda *_: peaks.append(seen.peak_bytes))
    inputs = Inputs(tokens_bt=torch.randint(0, 64, (BATCH, SEQ)), position_ids=torch.arange(SEQ).expand(BATCH, SEQ))
    with torch.no_grad():
        hidden_fwd(lm, inputs)  # makes Megatron's global buffer
        with seen:
            hidden_fwd(lm, inputs)
    parallel_state.destroy_model_parallel()
    return max(peaks), [name for layer in lm.decoder.layers for name in ROUTING_MAPS if getattr(layer.mlp.token_dispatcher, name) is not None]


@pytest.mark.parametrize("ep", [1, 2])
def test_frozen_experts_hold_what_the_planner_says(megatron_ranks, ep):
    from megatron_kd.plan.activations import ActivationSpec, layer_forward_peak
    from megatron_kd.plan.models import from_config

    model = from_config(FROZEN, "frozen")
    spec = ActivationSpec(ep=ep, seq=SEQ, micro_batch=BATCH, kernels="torch")
    want = layer_forward_peak(model, 0, spec) * SEQ * BATCH
    for got, kept in megatron_ranks.run(frozen_experts_peak, 2, timeout_s=120, config=FROZEN, ep=ep):
        assert kept == []
        assert abs(want / got - 1) < 0.02, (ep, want / got)
