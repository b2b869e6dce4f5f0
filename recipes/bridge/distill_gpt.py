#!/usr/bin/env python3
"""A Megatron-Bridge training script of the usual shape, with distillation added.

    torchrun --nproc-per-node 8 recipes/bridge/distill_gpt.py --student openai/gpt-oss-20b --teacher openai/gpt-oss-120b \
        model.tensor_model_parallel_size=2 model.expert_model_parallel_size=8 train.train_iters=1000

The lines marked `distillation` are all that it has beyond a plain pretraining script. Overrides are attributes of
Bridge's ConfigContainer by dotted path. In your own script `pretrain_config` is one of Bridge's recipes; here it is written out so that it
also works without a hub.
"""

import argparse
import functools

import torch
import yaml
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import (CheckpointConfig, ConfigContainer, DistributedDataParallelConfig, LoggerConfig, MockGPTDatasetConfig, OptimizerConfig, RNGConfig,
                                             SchedulerConfig, TokenizerConfig, TrainingConfig, ValidationConfig)
from megatron.bridge.training.pretrain import pretrain

import megatron_kd  # distillation


def pretrain_config(student: str, seq_length: int = 4096) -> ConfigContainer:
    """What a recipe of Bridge returns: the student with its pretrained weights, mock data, bf16."""
    model = AutoBridge.from_hf_pretrained(student, dtype=torch.bfloat16).to_megatron_provider(load_weights=True)
    model.seq_length = seq_length
    return ConfigContainer(
        model=model,
        train=TrainingConfig(train_iters=1000, global_batch_size=64, micro_batch_size=1),
        validation=ValidationConfig(eval_interval=200, eval_iters=4),
        optimizer=OptimizerConfig(optimizer="adam", lr=2e-5, min_lr=2e-6, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0, use_distributed_optimizer=True, bf16=True),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=10, start_weight_decay=0.1, end_weight_decay=0.1),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True, average_in_collective=False),
        dataset=MockGPTDatasetConfig(seq_length=seq_length, random_seed=1234, reset_attention_mask=False, reset_position_ids=False, eod_mask_loss=False, num_workers=1,
                                     dataloader_type="single", data_sharding=True, create_attention_mask=False, skip_getting_attention_mask_from_dataset=True, split="9,1,0"),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size - 1),
        checkpoint=CheckpointConfig(save="out/distill_gpt/checkpoints", save_interval=200, ckpt_format="torch_dist"),
        logger=LoggerConfig(log_interval=10),
        rng=RNGConfig(seed=1234),
        mixed_precision="bf16_mixed",
    )


def apply_overrides(cfg: ConfigContainer, overrides: list[str]) -> None:
    """`a.b=value` sets cfg.a.b; values are YAML."""
    for override in overrides:
        path, _, value = override.partition("=")
        *parents, name = path.split(".")
        owner = functools.reduce(getattr, parents, cfg)
        if not hasattr(owner, name):
            raise SystemExit(f"{path}: Bridge's configuration has no such setting")
        setattr(owner, name, yaml.safe_load(value))


def main(argv: list[str] | None = None) -> None:
    """Parse, configure, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", required=True, help="Hugging Face folder or hub name")
    parser.add_argument("--teacher", required=True, help="the same")
    args, overrides = parser.parse_known_args(argv)

    cfg = pretrain_config(args.student)
    apply_overrides(cfg, overrides)
    kd = megatron_kd.attach(cfg, teacher=args.teacher)  # distillation
    pretrain(cfg, kd.forward_step, callbacks=kd.callbacks)  # was: pretrain(cfg, forward_step)


if __name__ == "__main__":
    main()
