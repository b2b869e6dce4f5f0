"""Tiny models and whole Bridge trainings for tests, with the plugin and with dense logits. Run inside the processes of `megatron_ranks`.

The dense side shares nothing with the plugin: Megatron's own output layer forms the logits, transformers runs the teacher, autograd does the rest.
"""

import contextlib
import functools
import io
import logging
import os
from dataclasses import dataclass, replace

import torch

TRUE_VOCAB, STUDENT_VOCAB, TEACHER_VOCAB, SEQ = 131, 132, 131, 24


def make_models(folder) -> dict[str, str]:
    """Tiny random Hugging Face models: Llama teachers (one with the student's vocabulary, one broken), students llama, tied, gptoss (4 experts)."""
    import transformers as hf

    torch.manual_seed(0)
    llama = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    small = dict(hidden_size=32, intermediate_size=64, head_dim=8, vocab_size=STUDENT_VOCAB, **llama)
    models = {
        "teacher": hf.LlamaForCausalLM(hf.LlamaConfig(hidden_size=48, intermediate_size=96, vocab_size=TEACHER_VOCAB, tie_word_embeddings=False, **llama)),
        "llama": hf.LlamaForCausalLM(hf.LlamaConfig(tie_word_embeddings=False, **small)),
        "tied": hf.LlamaForCausalLM(hf.LlamaConfig(tie_word_embeddings=True, **small)),
        "gptoss": hf.GptOssForCausalLM(hf.GptOssConfig(
            vocab_size=STUDENT_VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            num_local_experts=4, num_experts_per_tok=2, sliding_window=8, max_position_embeddings=4096 * 32, pad_token_id=0, eos_token_id=1, tie_word_embeddings=False)),
    }
    models["teacher_full"] = hf.LlamaForCausalLM(hf.LlamaConfig(hidden_size=48, intermediate_size=96, vocab_size=STUDENT_VOCAB, tie_word_embeddings=True, **llama))
    models["teacher_nan"] = hf.LlamaForCausalLM(hf.LlamaConfig(hidden_size=48, intermediate_size=96, vocab_size=TEACHER_VOCAB, tie_word_embeddings=False, **llama))
    paths = {}
    for name, model in models.items():
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.2 if name.startswith("teacher") else 0.08)
            if name == "teacher_nan":  # every row from a sequence's first token 7 on
                model.model.embed_tokens.weight[7] = float("nan")
        paths[name] = os.path.join(str(folder), name)
        model.float().save_pretrained(paths[name])
    return paths


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of a tiny student."""

    student: str
    teacher: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    sp: bool = False
    iters: int = 2
    global_batch: int = 8
    micro_batch: int = 2
    per_token: bool = True
    distributed_optimizer: bool = False
    weight: float = 1.0
    pattern: tuple | None = None
    dataloader: str = "single"
    eval_iters: int = 0
    save: str | None = None
    save_interval: int | None = None
    load: str | None = None
    tensorboard: str | None = None
    rampup: tuple | None = None
    skipped: tuple = ()
    freeze_head: bool = False
    softcap: float | None = None
    random_init: bool = False
    builder: bool = False
    bf16: bool = False
    fallback: bool = False
    overrides: tuple = ()


def config(run: Run, world: int):
    """The ConfigContainer of `run`."""
    from megatron.bridge.training import config as bridge

    from megatron_kd.layout import ParallelLayout
    from megatron_kd.mcore.model import provider_for
    from tests.mcore_data import PATTERN, PatternData

    dtype = torch.bfloat16 if run.bf16 else torch.float32
    layout = ParallelLayout.for_world(world, tp=run.tp, pp=run.pp, ep=run.ep, etp=run.etp, vpp=run.vpp, sequence_parallel=run.sp)
    if run.builder:
        provider = model_config(run, layout)
    else:
        provider = provider_for(run.student, layout=layout, dtype=dtype, seq_length=SEQ, load_weights=not run.random_init, overrides=dict(run.overrides))
    if run.freeze_head:
        provider.register_pre_wrap_hook(freeze_head)
    if run.softcap:
        provider.register_pre_wrap_hook(functools.partial(cap_head, softcap=run.softcap))
    sharded = run.distributed_optimizer
    return bridge.ConfigContainer(
        model=provider,
        train=bridge.TrainingConfig(train_iters=run.iters, global_batch_size=run.global_batch, micro_batch_size=run.micro_batch,
                                    rampup_batch_size=list(run.rampup) if run.rampup else None, iterations_to_skip=list(run.skipped)),
        validation=bridge.ValidationConfig(eval_interval=run.iters if run.eval_iters else None, eval_iters=run.eval_iters),
        optimizer=bridge.OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-2, adam_eps=1e-2, weight_decay=0.0, use_distributed_optimizer=sharded, bf16=run.bf16, params_dtype=dtype,
                                         clip_grad=1.0),
        scheduler=bridge.SchedulerConfig(override_opt_param_scheduler=True, lr_decay_style="constant", lr_warmup_iters=0, lr_decay_iters=4, start_weight_decay=0.0, end_weight_decay=0.0),
        ddp=bridge.DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=sharded, overlap_param_gather=sharded, use_distributed_optimizer=sharded,
                                                 average_in_collective=False, check_for_nan_in_grad=True, bucket_size=3000 if sharded else None),
        dataset=PatternData(seq_length=SEQ, vocab_size=TRUE_VOCAB, weight=run.weight, pattern=run.pattern or PATTERN, dataloader_type=run.dataloader, num_workers=0,
                            pin_memory=False, persistent_workers=False, data_sharding=True),
        logger=bridge.LoggerConfig(log_interval=1, logging_level=logging.ERROR, tensorboard_dir=run.tensorboard),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=TRUE_VOCAB - 1),
        checkpoint=bridge.CheckpointConfig(save=run.save, load=run.load, save_interval=run.save_interval, ckpt_format="torch_dist", async_save=False),
        rng=bridge.RNGConfig(seed=1), dist=bridge.DistributedInitConfig(distributed_backend="gloo", use_gloo_process_groups=True), mixed_precision="bf16_mixed" if run.bf16 else None)


def model_config(run: Run, layout):
    """megatron-core's ModelConfig, which its own builder makes into a model: the other kind of `cfg.model` that Bridge takes."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.models.gpt import GPTModelConfig

    from megatron_kd.mcore.model import device_overrides, layout_overrides

    known = TransformerConfig.__dataclass_fields__
    settings = {name: value for name, value in {**device_overrides(), **layout_overrides(layout)}.items() if name in known}
    transformer = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0,
                                    attention_dropout=0.0, params_dtype=torch.float32, pipeline_dtype=torch.float32, **settings)
    return GPTModelConfig(transformer=transformer, transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=STUDENT_VOCAB, seq_length=SEQ,
                          position_embedding_type="rope")


def freeze_head(chunks):
    """Pre-wrap hook."""
    chunks[-1].output_layer.weight.requires_grad_(False)
    return chunks


def cap_head(chunks, softcap):
    """Pre-wrap hook: the output layer of Bridge's Gemma 2, which caps its logits."""
    from megatron.bridge.models.gemma.gemma2_provider import Gemma2OutputLayer

    if chunks[-1].post_process:
        chunks[-1].output_layer.__class__ = Gemma2OutputLayer
        chunks[-1].output_layer.config.final_logit_softcapping = softcap
    return chunks


class Recorder:
    """What a training leaves: reduced losses and gradient norm by step, evaluations, and this rank's parameters before and after."""

    def __init__(self):
        self.steps, self.evaluations, self.before, self.after, self.state = [], [], {}, {}, None

    def callback(self):
        """Bridge callback."""
        from megatron_kd.mcore.callbacks import callback

        def parameters(context):
            return {f"{i}.{name}": parameter.detach().clone() for i, chunk in enumerate(context.model) for name, parameter in chunk.named_parameters()}

        def on_train_start(context):
            self.before = parameters(context)

        def on_train_step_end(context):
            self.steps.append(({name: float(value) for name, value in (context.loss_dict or {}).items()}, float(context.grad_norm)))
            self.after = parameters(context)

        def on_eval_end(context):
            self.evaluations.append({name: float(value) for name, value in context.total_loss_dict.items()})

        return callback(on_train_start=on_train_start, on_train_step_end=on_train_step_end, on_eval_end=on_eval_end)


@contextlib.contextmanager
def quiet():
    """Bridge prints hundreds of lines a run."""
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def without_output_processor(wanted: bool):
    """Where wanted, the hook takes the way in that models without megatron-core's official one need."""
    from megatron_kd.student import engine

    original = engine.OutputLayerHook
    if wanted:
        engine.OutputLayerHook = functools.partial(original, use_output_processor=False)
    try:
        yield
    finally:
        engine.OutputLayerHook = original


def train_distilled(run: Run, world: int, *, loss: dict, step=None, prepare=None, callbacks=()) -> Recorder:
    """`run` with the plugin. `prepare(cfg)` may change the configuration before attach."""
    import megatron_kd
    from megatron.bridge.training.pretrain import pretrain

    from megatron_kd.config.schema import LossConfig

    recorder = Recorder()
    with quiet(), without_output_processor(run.fallback):
        cfg = config(run, world)
        if prepare is not None:
            prepare(cfg)
        kd = megatron_kd.attach(cfg, teacher=run.teacher, loss=LossConfig(**loss), per_token_loss=run.per_token)
        try:
            pretrain(cfg, kd.forward_step if step is None else kd.wrap(step), callbacks=[*kd.callbacks, *callbacks, recorder.callback()])
        finally:
            kd.close()
    return recorder


def train_dense(run: Run, world: int, *, loss: dict, prepare=None) -> Recorder:
    """`run` with full logits of both models and autograd."""
    from megatron.bridge.training.pretrain import pretrain

    recorder = Recorder()
    run = replace(run, overrides=tuple((name, value) for name, value in run.overrides if name != "overlap_moe_expert_parallel_comm"))  # another schedule of the same sums
    with quiet():
        cfg = config(run, world)
        cfg.model.calculate_per_token_loss = run.per_token
        if prepare is not None:
            prepare(cfg)
        pretrain(cfg, DenseStep(run.teacher, **loss), callbacks=[recorder.callback()])
    return recorder


class DenseStep:
    """Bridge forward step: logits from Megatron's output layer, gathered over TP; teacher by transformers; KL and CE by autograd.

    Rows whose teacher is not finite are left out of sums and count.
    """

    def __init__(self, teacher: str, *, kd_weight: float, ce_weight: float, temperature: float, **_):
        from transformers import AutoModelForCausalLM

        self.teacher = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval().requires_grad_(False)
        self.kd_weight, self.ce_weight, self.temperature = kd_weight, ce_weight, temperature

    def __call__(self, state, data_iterator, model, return_schedule_plan=False):
        from megatron.core.utils import unwrap_model

        inner = unwrap_model(model)
        needs_data = inner.pre_process or inner.post_process
        batch = next(data_iterator) if needs_data else dict.fromkeys(("tokens", "position_ids", "labels", "loss_mask"))

        def logits(*, hidden_states, output_layer, output_weight, scale_logits, **_):
            return scale_logits(output_layer(hidden_states, weight=output_weight)[0]).transpose(0, 1).contiguous()

        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], output_processor=logits)
        return output, lambda logits: self.loss(logits, batch, inner)

    def loss(self, logits, batch, inner):
        """Megatron's three values."""
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        with torch.no_grad():
            teacher = self.teacher(batch["tokens"]).logits
        true_size = min(teacher.shape[-1], STUDENT_VOCAB)
        logits = gather_from_tensor_model_parallel_region(logits, group=inner.pg_collection.tp)[..., :true_size].float()
        mask = batch["loss_mask"] * teacher.isfinite().all(-1)
        log_q, log_p = (logits / self.temperature).log_softmax(-1), (teacher.nan_to_num() / self.temperature).log_softmax(-1)
        kd = (log_p.exp() * (log_p - log_q)).sum(-1) * self.temperature**2
        ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").view_as(kd)
        total = ((self.kd_weight * kd + self.ce_weight * ce) * mask).sum()
        num = mask.sum().to(torch.int)
        report = {name: torch.stack([value.detach(), num.float()]) for name, value in (("total loss", total), ("kd loss", (kd * mask).sum()), ("ce loss", (ce * mask).sum()))}
        return total, num, report


def difference(ours: Recorder, dense: Recorder) -> tuple[float, float]:
    """(largest parameter difference after training, largest movement of a parameter in the dense run) on this rank."""
    worst = max((ours.after[name] - value).abs().max().item() for name, value in dense.after.items())
    moved = max((value - dense.before[name]).abs().max().item() for name, value in dense.after.items())
    return worst, moved
