"""Which collection of a cache a recipe means: the same function for the build and for the training that reads it.

Called by student/cached.py, `megatron-kd cache` and nothing else.
"""

from pathlib import Path

from megatron_kd.cache.key import CacheContext
from megatron_kd.cache.spec import Collection, PayloadSpec
from megatron_kd.cache.storage import Storage
from megatron_kd.config.schema import CacheConfig
from megatron_kd.errors import ConfigError, rule
from megatron_kd.fingerprint import tokenizer_digest
from megatron_kd.teacher.identity import identify


def storage_of(cache: CacheConfig, output_dir: str | None) -> Storage:
    """The store that `cache.location` names, or OUTPUT_DIR/cache."""
    if cache.location is None and output_dir is None:
        raise ConfigError(rule("cache.location", None, "must be given where there is no output_dir", "Set it to a folder or a URL such as s3://bucket/prefix"))
    return Storage(cache.location or str(Path(output_dir) / "cache"))


def collection_of(cache: CacheConfig, *, teacher_dir: str, true_vocab: int) -> Collection:
    """Teacher, tokenizer, head transform and payload. Computes the teacher's fingerprint where it is not remembered: one read of its weights.

    Errors: ConfigError where the folder holds no tokenizer.
    """
    identity = identify(teacher_dir, compute_fingerprint=True)
    context = CacheContext(teacher=identity.fingerprint, tokenizer=tokenizer_digest(teacher_dir).hex(), head_transform=identity.head_transform)
    return Collection(context=context, spec=payload_of(cache, hidden_size=identity.hidden_size, true_vocab=true_vocab))


def payload_of(cache: CacheConfig, *, hidden_size: int, true_vocab: int) -> PayloadSpec:
    """What a row of this cache is."""
    if cache.payload == "hidden":
        return PayloadSpec(kind="hidden", width=hidden_size, precision=cache.hidden_rows, vocab_size=true_vocab)
    if cache.selection == "sampled":
        return PayloadSpec(kind="sampled", width=cache.k, precision="fp32", vocab_size=true_vocab)
    return PayloadSpec(kind="topk", width=cache.k, precision=cache.log_probs, vocab_size=true_vocab)
