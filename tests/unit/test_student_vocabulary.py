"""The pair's vocabulary: true size, paddings, and tokenizers that differ named by id."""

import pytest

from megatron_kd.config.schema import TeacherConfig
from megatron_kd.errors import ConfigError, TokenizerMismatch, VocabMismatch
from megatron_kd.student import vocabulary


class Tokenizer:
    def __init__(self, *tokens):
        self.tokens = tokens

    def get_vocab(self):
        return {token: index for index, token in enumerate(self.tokens) if token is not None}


def test_true_size_is_the_highest_id_plus_one():
    assert vocabulary.size_of(Tokenizer("a", None, "added")) == 3


def test_a_teacher_may_know_more_tokens():
    vocabulary.check_same_tokens(Tokenizer("a", "b"), Tokenizer("a", "b", "c"))


def test_other_tokens_and_unknown_ids_are_named():
    with pytest.raises(TokenizerMismatch, match=r"1: 'b' / 'x'.*1 ids are other tokens and 1 are unknown"):
        vocabulary.check_same_tokens(Tokenizer("a", "b", "c"), Tokenizer("a", "x"))


def test_spec_without_tokenizers_takes_the_smaller_vocabulary():
    spec = vocabulary.resolve_vocab(student_padded=136, student_vocab=132, teacher_vocab=131, tp=2)
    assert (spec.true_size, spec.student_padded, spec.teacher_padded, spec.tp) == (131, 136, 131, 2)


def test_a_student_smaller_than_its_tokenizer_is_refused(monkeypatch):
    monkeypatch.setattr(vocabulary, "load_tokenizer", lambda source: Tokenizer("a", "b", "c") if source else None)
    with pytest.raises(VocabMismatch, match="student vocabulary = 2"):
        vocabulary.resolve_vocab(student_padded=2, student_vocab=2, teacher_vocab=4, tp=1, student_tokenizer="x")


def test_a_teacher_smaller_than_the_tokenizer_is_refused(monkeypatch):
    monkeypatch.setattr(vocabulary, "load_tokenizer", lambda source: Tokenizer("a", "b", "c") if source else None)
    with pytest.raises(VocabMismatch, match="teacher_padded"):
        vocabulary.resolve_vocab(student_padded=4, student_vocab=4, teacher_vocab=2, tp=1, student_tokenizer="x")


def test_a_teacher_with_a_shorter_context_is_refused():
    class Config:
        max_position_embeddings = 2048

    vocabulary.check_context(TeacherConfig(model="t"), Config, 2048)
    vocabulary.check_context(TeacherConfig(model="t", context_length=8192), Config, 4096)
    with pytest.raises(ConfigError, match="teacher context = 2048"):
        vocabulary.check_context(TeacherConfig(model="t"), Config, 4096)
