"""What a teacher's configuration and tokenizer must agree on with the student: vocabulary, both paddings, ids, context length.

Called by the engine when the student's model exists, and by attach for what can be known before. Imports transformers at first use.
"""

import logging
import os

from megatron_kd.config.schema import TeacherConfig
from megatron_kd.errors import ConfigError, TokenizerMismatch, VocabMismatch, rule
from megatron_kd.vocab import VocabSpec

logger = logging.getLogger(__name__)
MAX_NAMED_IDS = 8
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(source: str | None):
    """The Hugging Face tokenizer of a folder or hub name; None where there is none (a model folder without tokenizer files)."""
    if source is None or (os.path.isdir(source) and not any(os.path.exists(os.path.join(source, name)) for name in TOKENIZER_FILES)):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as e:
        logger.warning("no tokenizer could be loaded from %s (%s); ids are not compared", source, e)
        return None


def size_of(tokenizer) -> int:
    """Highest id + 1, added tokens included."""
    return max(tokenizer.get_vocab().values()) + 1


def check_same_tokens(student, teacher) -> None:
    """TokenizerMismatch, naming ids, unless every id that both know is the same token and the student's ids are known to the teacher."""
    ours, theirs = ({index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in (student, teacher))
    different = [index for index in sorted(ours) if index in theirs and ours[index] != theirs[index]]
    missing = [index for index in sorted(ours) if index not in theirs]
    if not different and not missing:
        return
    named = [f"{index}: {ours[index]!r} / {theirs.get(index)!r}" for index in (different + missing)[:MAX_NAMED_IDS]]
    raise TokenizerMismatch(rule("ids that differ (student / teacher)", "; ".join(named), f"{len(different)} ids are other tokens and {len(missing)} are unknown to the teacher",
                                 "Distil from a teacher with the student's tokenizer"))


def text_config(model: str):
    """The Hugging Face configuration of a model's language part."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    return getattr(config, "text_config", config)


def check_context(teacher: TeacherConfig, config, seq_length: int) -> None:
    """ConfigError where the teacher's context is shorter than the student's sequences."""
    longest = teacher.context_length or getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < seq_length:
        raise ConfigError(rule("teacher context", longest, f"is shorter than the student's sequences, {seq_length}",
                               "Shorten the sequences, take another teacher, or set teacher.context_length if its configuration understates it"))


def resolve_vocab(*, student_padded: int, student_vocab: int, teacher_vocab: int, tp: int, explicit: int | None = None,
                  student_tokenizer: str | None = None, teacher_tokenizer: str | None = None) -> VocabSpec:
    """The VocabSpec of a pair, with tokenizers compared where both can be loaded.

    True size: `explicit`, else the student's tokenizer's highest id + 1, else the smaller of the two models' vocabularies.
    Errors: TokenizerMismatch, VocabMismatch.
    """
    ours, theirs = load_tokenizer(student_tokenizer), load_tokenizer(teacher_tokenizer)
    if ours is not None and theirs is not None:
        check_same_tokens(ours, theirs)
    true_size = explicit or (size_of(ours) if ours is not None else min(student_vocab, teacher_vocab))
    if ours is not None and true_size > student_vocab:
        raise VocabMismatch(rule("student vocabulary", student_vocab, f"is smaller than its tokenizer's, {true_size}", "Use the tokenizer that the student was made for"))
    return VocabSpec(true_size=true_size, student_padded=student_padded, teacher_padded=teacher_vocab, tp=tp)
