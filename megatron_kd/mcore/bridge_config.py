"""Recipe -> Megatron-Bridge's ConfigContainer for the student.

Owns the translation and nothing else: what it writes is what a Bridge user could have written by hand. Called by `megatron-kd train`.
The recipe's `bridge` section is applied last, by dotted path. The CPU runtime must be installed first where there is no GPU.
"""

import difflib
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_kd.config.schema import Recipe
from megatron_kd.errors import ConfigError, rule
from megatron_kd.mcore.configure import register_pre_wrap_hook
from megatron_kd.mcore.data import PreparedText
from megatron_kd.mcore.model import language_model, provider_for

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the recipe's model and data lie on this machine."""

    student: str
    """Hugging Face folder or hub name; its weights are the student's start unless student.init is random."""
    tokenizer: str | None
    """Hugging Face tokenizer; None for mock data."""
    text: PreparedText | None
    """Indexed text for data.kind: text."""


def config_container(recipe: Recipe, sources: Sources, world_size: int):
    """The ConfigContainer that `pretrain()` runs. Errors: ConfigError, UnsupportedLayout."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training.config import ConfigContainer, RNGConfig

    layout, dtype = recipe.student.layout.for_world(world_size), DTYPES[recipe.student.precision]
    model_overrides = {k.removeprefix("model."): v for k, v in recipe.bridge.items() if k.startswith("model.") and k.count(".") == 1}
    if recipe.train.recompute != "none":
        model_overrides = {"recompute_granularity": recipe.train.recompute, **model_overrides}
        if recipe.train.recompute == "full":
            model_overrides = {"recompute_method": "uniform", "recompute_num_layers": 1, **model_overrides}
    for name, value in model_overrides.items():
        if name not in GPTModelProvider.__dataclass_fields__:
            nearest = difflib.get_close_matches(name, GPTModelProvider.__dataclass_fields__, n=1, cutoff=0.0)[0]
            raise ConfigError(
                rule(f"bridge.model.{name}", value, "Megatron-Bridge's model has no such setting", f"Did you mean bridge.model.{nearest}")
            )
    provider = provider_for(
        _model_source(recipe, sources),
        layout=layout,
        dtype=dtype,
        seq_length=recipe.data.seq_length,
        load_weights=recipe.student.init != "random",
        overrides=model_overrides,
    )
    cfg = ConfigContainer(
        model=provider,
        train=_training(recipe),
        validation=_validation(recipe),
        optimizer=_optimizer(recipe, dtype),
        scheduler=_scheduler(recipe),
        ddp=_ddp(recipe),
        dataset=_dataset(recipe, sources),
        tokenizer=_tokenizer(recipe, sources, provider.vocab_size),
        logger=_logger(recipe),
        checkpoint=_checkpoint(recipe, sources),
        rng=RNGConfig(seed=recipe.train.seed),
        mixed_precision="bf16_mixed" if recipe.student.precision == "bf16" else None,
    )
    if recipe.device == "cpu":
        cfg.dist.distributed_backend, cfg.dist.use_gloo_process_groups = "gloo", True
    if recipe.student.lora is not None:
        cfg.peft = _lora(recipe)
    if recipe.student.freeze_head:
        register_pre_wrap_hook(cfg, _freeze_head)
    for path, value in recipe.bridge.items():
        if not (path.startswith("model.") and path.count(".") == 1):
            set_by_path(cfg, path, value)
    return cfg


def set_by_path(cfg, path: str, value) -> None:
    """`cfg.a.b = value` for "a.b". Errors: ConfigError naming the nearest attribute where one does not exist."""
    owner, walked = cfg, "bridge"
    *parents, last = path.split(".")
    for part in parents:
        _require(owner, part, walked, path, value)
        owner, walked = getattr(owner, part), f"{walked}.{part}"
    _require(owner, last, walked, path, value)
    setattr(owner, last, value)


def _require(owner: object, part: str, walked: str, path: str, value: object) -> None:
    if hasattr(owner, part):
        return
    known = [name for name in dir(owner) if not name.startswith("_") and not callable(getattr(type(owner), name, None))]
    nearest = difflib.get_close_matches(part, known, n=1, cutoff=0.0)
    raise ConfigError(
        rule(f"bridge.{path}", value, f"{walked} has no attribute {part!r}", f"Did you mean {walked}.{nearest[0]}" if nearest else "Remove it")
    )


def _model_source(recipe: Recipe, sources: Sources):
    if recipe.student.init != "random":
        return sources.student
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(sources.student)


def _training(recipe: Recipe):
    from megatron.bridge.training.config import TrainingConfig

    train = recipe.train
    return TrainingConfig(
        train_iters=train.iters,
        global_batch_size=train.global_batch,
        micro_batch_size=train.micro_batch,
        rampup_batch_size=list(train.rampup_batch) if train.rampup_batch else None,
    )


def _validation(recipe: Recipe):
    """Bridge sizes the validation set by `iters // interval + 1` evaluations and always evaluates once after training."""
    from megatron.bridge.training.config import ValidationConfig

    interval = recipe.train.eval_interval or recipe.train.iters + 1
    return ValidationConfig(eval_iters=recipe.train.eval_iters, eval_interval=interval if recipe.train.eval_iters else None)


def _optimizer(recipe: Recipe, dtype: torch.dtype):
    from megatron.bridge.training.config import OptimizerConfig

    train = recipe.train
    return OptimizerConfig(
        optimizer="adam",
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        clip_grad=train.clip_grad,
        use_distributed_optimizer=train.distributed_optimizer,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
    )


def _scheduler(recipe: Recipe):
    """The recipe's schedule holds on resume too, so that a run can be made longer."""
    from megatron.bridge.training.config import SchedulerConfig

    train = recipe.train
    return SchedulerConfig(
        lr_decay_style=train.lr_decay,
        lr_warmup_iters=train.warmup_iters,
        lr_decay_iters=train.iters,
        start_weight_decay=train.weight_decay,
        end_weight_decay=train.weight_decay,
        override_opt_param_scheduler=True,
    )


def _ddp(recipe: Recipe):
    from megatron.bridge.training.config import DistributedDataParallelConfig

    train = recipe.train
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=train.overlap_grad_reduce,
        overlap_param_gather=train.overlap_param_gather,
        use_distributed_optimizer=train.distributed_optimizer,
        average_in_collective=False,
        check_for_nan_in_grad=True,
    )


def _dataset(recipe: Recipe, sources: Sources):
    from megatron.bridge.training.config import GPTDatasetConfig, GPTSFTDatasetConfig, MockGPTDatasetConfig

    data = recipe.data
    on_gpu = recipe.device == "cuda"
    common = dict(num_workers=data.num_workers, pin_memory=on_gpu, persistent_workers=data.num_workers > 0, data_sharding=True)
    if data.kind == "sft":
        packing = {}
        if data.packed:
            from megatron.bridge.data.packing.config import PackedSequenceSpecs

            specs = PackedSequenceSpecs(packed_sequence_size=data.seq_length, pad_seq_to_mult=packing_multiple(recipe))
            packing = dict(enable_offline_packing=True, offline_packing_specs=specs)
        return GPTSFTDatasetConfig(
            seq_length=data.seq_length,
            dataset_root=data.sft_dir,
            seed=recipe.train.seed,
            do_validation=recipe.train.eval_iters > 0,
            do_test=False,
            dataloader_type="batch",
            **common,
            **packing,
        )
    gpt = dict(
        seq_length=data.seq_length,
        random_seed=recipe.train.seed,
        reset_attention_mask=False,
        reset_position_ids=False,
        eod_mask_loss=False,
        dataloader_type="single",
        create_attention_mask=False,
        skip_getting_attention_mask_from_dataset=True,
        num_dataset_builder_threads=1,
        **common,
    )
    if data.kind == "mock":
        return MockGPTDatasetConfig(split="9,1,0" if recipe.train.eval_iters else "1,0,0", **gpt)
    if data.kind == "text":
        from megatron.core.datasets.utils import get_blend_from_list

        held_out = get_blend_from_list([sources.text.held_out_prefix]) if recipe.train.eval_iters else None
        return GPTDatasetConfig(
            blend_per_split=[get_blend_from_list([sources.text.train_prefix]), held_out, None], path_to_cache=f"{sources.text.folder}/index", **gpt
        )
    return GPTDatasetConfig(data_path=list(data.paths), split=data.split, path_to_cache=data.cache_dir, **gpt)


def packing_multiple(recipe: Recipe) -> int:
    """What packed documents are padded to a multiple of: context parallelism cuts each into 2 x cp equal chunks, on both sides."""
    degrees = [part.cp for part in (recipe.student.layout, recipe.teacher.layout) if part is not None]
    return 2 * math.lcm(*degrees) if max(degrees) > 1 else 1


def _tokenizer(recipe: Recipe, sources: Sources, vocab_size: int):
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    if sources.tokenizer is None:  # mock ids: NullTokenizer adds one end-of-document id
        return TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size - 1)
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=sources.tokenizer)


def _logger(recipe: Recipe):
    from megatron.bridge.training.config import LoggerConfig

    train, out = recipe.train, Path(recipe.output_dir)
    extra = dict(mlflow_experiment=train.mlflow_experiment, mlflow_run_name=recipe.name) if train.mlflow_experiment else {}
    if train.wandb_project:
        extra |= dict(wandb_project=train.wandb_project, wandb_exp_name=recipe.name, wandb_save_dir=str(out / "wandb"))
    return LoggerConfig(
        log_interval=train.log_interval,
        tensorboard_dir=str(out / "tensorboard") if train.tensorboard else None,
        log_throughput=False,
        logging_level=logging.WARNING,
        **extra,
    )


def checkpoint_folder(recipe: Recipe) -> Path:
    """Where this recipe's checkpoints go."""
    return Path(recipe.output_dir) / "checkpoints"


def has_checkpoint(folder: Path) -> bool:
    """Whether Bridge finds a finished checkpoint in `folder`."""
    return (folder / "latest_train_state.pt").is_file()


def checkpoint_step(recipe: Recipe) -> int:
    """Training steps that the checkpoint holds which this run resumes from; 0 for a run from the start."""
    folder = checkpoint_folder(recipe)
    if not recipe.train.resume or not has_checkpoint(folder):
        return 0
    from megatron.bridge.training.utils.checkpoint_utils import get_checkpoint_train_state_filename, read_train_state

    return read_train_state(get_checkpoint_train_state_filename(str(folder), prefix="latest")).step


def _checkpoint(recipe: Recipe, sources: Sources):
    """Bridge wants to know where the frozen weights under adapters come from: an adapter checkpoint does not hold them."""
    from megatron.bridge.training.config import CheckpointConfig

    folder, train = checkpoint_folder(recipe), recipe.train
    if recipe.student.lora is not None and not Path(sources.student).is_dir():
        raise ConfigError(
            rule(
                "student.model", sources.student, "adapters need their base weights in a local folder", "Download the model first and give its folder"
            )
        )
    return CheckpointConfig(
        save=str(folder) if train.save else None,
        save_interval=train.save_interval or train.iters if train.save else None,
        load=str(folder) if train.resume and has_checkpoint(folder) else None,
        ckpt_format="torch_dist",
        async_save=False,
        pretrained_checkpoint=sources.student if recipe.student.lora is not None else None,
    )


def _lora(recipe: Recipe):
    from megatron.bridge.peft.lora import LoRA

    lora = recipe.student.lora
    return LoRA(target_modules=list(lora.target_modules), dim=lora.rank, alpha=lora.alpha, dropout=lora.dropout)


def _freeze_head(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Pre-wrap hook: the output head takes no gradient. Errors: ConfigError where the embedding shares its weight."""
    lm = language_model(chunks[-1])
    if lm.share_embeddings_and_output_weights:
        raise ConfigError(rule("student.freeze_head", True, "this model's head is its embedding", "Set student.freeze_head=false"))
    if lm.post_process:
        lm.output_layer.weight.requires_grad_(False)
    return chunks
