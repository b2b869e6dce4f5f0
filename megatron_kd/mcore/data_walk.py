"""Every batch that a recipe's training and evaluation will read, without a trainer: for building and checking a cache.

Owns how Bridge's data sets are made outside of its setup(). Order, shuffling and data-parallel split do not matter to a cache, so samples
are visited in order of their index; the same on every rank. The CPU runtime must be installed first where there is no GPU.
"""

import inspect
from collections.abc import Iterator

from torch.utils.data import default_collate

Batch = dict


def datasets_of(cfg) -> dict:
    """{"train": data set or None, "eval": ...} and how many of their first samples are read, as pairs. Needs torch.distributed."""
    from megatron.bridge.data.loaders import build_train_valid_test_datasets, get_train_valid_test_num_samples
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer

    for part in (cfg.validation, cfg.dataset):
        if hasattr(part, "finalize"):
            part.finalize()
    tokenizer = build_tokenizer(cfg.tokenizer)
    if hasattr(cfg.dataset, "tokenizer"):
        cfg.dataset.tokenizer = tokenizer
    if getattr(cfg.dataset, "token_dtype_code", 0) is None:
        cfg.dataset.token_dtype_code = 4 if tokenizer.vocab_size > 2**16 else 8
    provider = get_dataset_provider(cfg.dataset)
    known = {"tokenizer": tokenizer, "pg_collection": None}
    extra = {name: value for name, value in known.items() if name in inspect.signature(provider).parameters}
    train, evaluation, _ = build_train_valid_test_datasets(cfg, lambda sizes, dataset: provider(sizes, dataset, **extra))
    train_samples, _, _ = get_train_valid_test_num_samples(cfg)
    in_order = cfg.dataset.dataloader_type == "single"
    sizes = {"train": 0 if train is None else min(len(train), train_samples) if in_order else len(train), "eval": 0 if evaluation is None else len(evaluation)}
    return {"train": (train, sizes["train"]), "eval": (evaluation if cfg.validation.eval_iters else None, sizes["eval"] if cfg.validation.eval_iters else 0)}


def num_samples(datasets: dict, max_samples: int | None) -> int:
    """Samples that `walk` visits."""
    total = sum(size for _, size in datasets.values())
    return total if max_samples is None else min(total, max_samples)


def walk(datasets: dict, *, batch_size: int, max_samples: int | None = None) -> Iterator[tuple[str, Batch, int]]:
    """(mode, collated batch, samples in it) of training, then evaluation; at most `batch_size` samples a batch."""
    left = num_samples(datasets, max_samples)
    for mode, (dataset, size) in datasets.items():
        collate = getattr(dataset, "collate_fn", default_collate)
        for start in range(0, min(size, left), batch_size):
            samples = [dataset[index] for index in range(start, min(start + batch_size, size, left))]
            yield mode, collate(samples), len(samples)
        left -= min(size, left)
