"""A synthetic teacher for cache tests: answers follow from token ids alone, so any stored row can be checked without a model."""

import numpy as np
import torch
import xxhash

from megatron_kd.cache.codec import TopKRows, encode_hidden, encode_topk
from megatron_kd.cache.key import CacheContext
from megatron_kd.cache.segments import Segment, split
from megatron_kd.cache.spec import Collection, PayloadSpec
from megatron_kd.cache.writer import CacheWriter
from megatron_kd.rows import TokenBlock

VOCAB, K = 997, 6


def collection(teacher="teacher-a", tokenizer="tokenizer-a", transform="none", **spec) -> Collection:
    """A collection of the synthetic teacher."""
    fields = {"kind": "topk", "width": K, "vocab_size": VOCAB, "precision": "fp32", **spec}
    return Collection(context=CacheContext(teacher=teacher, tokenizer=tokenizer, head_transform=transform), spec=PayloadSpec(**fields))


def block(tokens, mask=None, cu_seqlens=None, micro_batch=0, positions=None) -> TokenBlock:
    """A TokenBlock of the given ids [b, s]; every row asked unless a mask is given."""
    tokens = torch.as_tensor(tokens)
    return TokenBlock(tokens_bs=tokens, loss_mask_bs=torch.ones(tokens.shape) if mask is None else torch.as_tensor(mask, dtype=torch.float32), position_ids_bs=positions,
                      cu_seqlens=None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32), step=0, micro_batch=micro_batch)


def random_tokens(num_sequences: int, length: int, seed: int = 0) -> torch.Tensor:
    """int64 ids."""
    return torch.randint(0, VOCAB, (num_sequences, length), generator=torch.Generator().manual_seed(seed))


def answer(ids_n: np.ndarray, width: int = K, vocab: int = VOCAB) -> TopKRows:
    """Teacher rows of all positions of a segment: each depends on the ids up to its position, as causal attention does."""
    rows = []
    for position in range(len(ids_n)):
        seed = xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids_n[:position + 1], dtype="<i8").tobytes())
        generator = np.random.default_rng(seed)
        kept = np.sort(generator.choice(vocab, width, replace=False))
        mass = generator.dirichlet(np.ones(width + 1))
        rows.append((kept, np.log(mass[:-1]), mass[-1]))
    ids, log_probs, tail = zip(*rows)
    return TopKRows(torch.from_numpy(np.stack(ids)), torch.tensor(np.stack(log_probs), dtype=torch.float32), torch.tensor(tail, dtype=torch.float32))


def hidden_answer(ids_n: np.ndarray, width: int) -> torch.Tensor:
    """bfloat16 rows [n, width] of all positions."""
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids_n, dtype="<i8").tobytes()) >> 1)
    return torch.randn(len(ids_n), width, generator=generator).bfloat16()


def store_segment(writer: CacheWriter, segment: Segment, made: Collection) -> bool:
    """Store the asked rows of a segment unless they are there; whether it was written."""
    if writer.has(segment):
        return False
    rows = np.unique(np.concatenate([segment.asked, *writer.stored_rows(segment.key)]))
    if made.spec.kind == "hidden":
        payload, error = encode_hidden(hidden_answer(segment.ids_n, made.spec.width)[rows], made.spec)
    else:
        payload, error = encode_topk(TopKRows(*(part[rows] for part in answer(segment.ids_n, made.spec.width, made.spec.vocab_size))), made.spec), 0.0
    writer.add(segment.key, segment.prefix, len(segment.ids_n), rows, payload, error)
    return True


def store(writer: CacheWriter, asked: TokenBlock, made: Collection) -> int:
    """Store all segments of a block; how many were written."""
    return sum(store_segment(writer, segment, made) for segment in split(asked))


def expect(asked: TokenBlock, width: int = K) -> TopKRows:
    """What the reader must return for a block."""
    parts = [TopKRows(*(part[torch.from_numpy(segment.asked)] for part in answer(segment.ids_n, width))) for segment in split(asked)]
    return TopKRows(*(torch.cat(columns) for columns in zip(*parts)))
