"""A deterministic Megatron data set for tests: tokens by index, masks in a pattern that leaves one whole micro-batch masked.

Imports Megatron at module level: only for the processes of `megatron_ranks`.
"""

from dataclasses import dataclass

import torch
from megatron.bridge.training.config import DatasetProvider

PATTERN = ("full", "prompt", "random", "prompt", "none", "none", "full", "random")


class PatternDataset(torch.utils.data.Dataset):
    """Sample i: random ids seeded by i, mask by PATTERN; labels are the next ids."""

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, weight: float, pattern=PATTERN):
        self.num_samples, self.seq_length, self.vocab_size, self.weight, self.pattern = num_samples, seq_length, vocab_size, weight, pattern

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 + int(index))
        ids = torch.randint(self.vocab_size, (self.seq_length + 1,), generator=generator)
        kind = self.pattern[index % len(self.pattern)]
        mask = torch.ones(self.seq_length)
        if kind == "none":
            mask.zero_()
        elif kind == "prompt":
            mask[: 5 + int(index) % 7] = 0
        elif kind == "random":
            mask = (torch.rand(self.seq_length, generator=generator) < 0.6).float()
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask * self.weight, "position_ids": torch.arange(self.seq_length)}


@dataclass(kw_only=True)
class PatternData(DatasetProvider):
    """Bridge's view of PatternDataset."""

    seq_length: int
    vocab_size: int
    weight: float = 1.0
    pattern: tuple = PATTERN
    skip_getting_attention_mask_from_dataset: bool = True

    def build_datasets(self, context):
        """Train, validation, no test."""
        make = lambda num: PatternDataset(num, self.seq_length, self.vocab_size, self.weight, self.pattern) if num else None  # noqa: E731
        return make(context.train_samples), make(context.valid_samples), None
