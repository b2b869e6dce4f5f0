"""A resumed run with the distributed optimizer is the unbroken one, bit for bit, in both formats of its checkpoint, small parameters and shared embeddings included."""

import dataclasses

import pytest
import torch

from tests.mcore_training import Run, make_models


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models; `qwen35_tied`: its first stage's bucket before the shared embedding ends 64 elements before a multiple of 128, in Gated DeltaNet's dt_bias."""
    import transformers as hf

    folder = tmp_path_factory.mktemp("models")
    models = make_models(folder)
    torch.manual_seed(0)
    config = hf.Qwen3_5TextConfig(vocab_size=132, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                  linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, max_position_embeddings=512,
                                  tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=1,
                                  rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True))
    hf.Qwen3_5ForCausalLM(config).float().save_pretrained(folder / "qwen35_tied")
    return models | {"qwen35_tied": str(folder / "qwen35_tied")}


def unbroken_and_resumed(rank, world, run, by_parameter, folder):
    """(steps, parameters) of three steps in one run, and of a third after a resume; a step after the load sees the moments too."""
    from tests.mcore_training import train_distilled
    from tests.megatron_cleanup import cleanup

    def prepare(cfg):
        cfg.checkpoint.dist_ckpt_optim_fully_reshardable = by_parameter
        cfg.ddp.overlap_param_gather = False  # else parameters are gathered only before the next step

    results = []
    for settings in (dict(iters=3), dict(iters=2, save=str(folder), save_interval=2), dict(iters=3, load=str(folder))):
        recorder = train_distilled(dataclasses.replace(run, **settings), world, loss=dict(kd_weight=0.7, ce_weight=0.3, temperature=1.0), prepare=prepare)
        results.append((recorder.steps, recorder.after))
        cleanup()
    return results[0], results[2]


@pytest.mark.parametrize(("student", "pp", "by_parameter"), [("qwen35_tied", 2, False), ("qwen35_tied", 2, True), ("llama", 1, True)],
                         ids=["embedding shared by stages, by bucket", "embedding shared by stages, by parameter", "padded buckets, by parameter"])
def test_resumed_with_the_distributed_optimizer_is_unbroken_bit_for_bit(megatron_ranks, models, tmp_path, student, pp, by_parameter):
    run = Run(student=models[student], teacher=models["teacher"], distributed_optimizer=True, global_batch=4, pp=pp)
    results = megatron_ranks.run(unbroken_and_resumed, 2, timeout_s=120, run=run, by_parameter=by_parameter, folder=tmp_path / "checkpoints")
    for (steps, parameters), (resumed_steps, resumed_parameters) in results:
        assert len(steps) == 3 and resumed_steps == steps[2:]
        assert all(torch.equal(resumed_parameters[name], value) for name, value in parameters.items())
