"""VocabSpec: which vocabulary columns are real, and which rank holds which.

Owns the true vocabulary size, both padded sizes and the shard ranges under tensor parallelism. Called by the loss, the
head loader, the planner and the wire's fingerprint. Imports no torch: plain integers, so a plan can be made anywhere.
"""

from dataclasses import dataclass

from megatron_kd.errors import VocabMismatch, rule


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabSpec:
    """Sizes in columns (token ids). Columns `true_size <= v < padded` are padding: -inf on both sides before max and sum.

    Errors: VocabMismatch where a size is not positive, a padded size is below the true one, or does not divide by `tp`.
    """

    true_size: int
    """Highest tokenizer id + 1, added tokens included."""
    student_padded: int
    """Rows of the student's output layer over all ranks; a multiple of `tp`."""
    teacher_padded: int
    """Rows of the teacher's output head in its checkpoint; need not divide by `tp` (it is resharded by token id)."""
    tp: int = 1
    """Tensor-parallel size of the student."""

    def __post_init__(self):
        for name in ("true_size", "student_padded", "teacher_padded", "tp"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise VocabMismatch(rule(f"VocabSpec.{name}", value, "must be a positive int", "Check the model's vocab_size"))
        if self.student_padded < self.true_size:
            raise VocabMismatch(rule("VocabSpec.student_padded", self.student_padded, f"must be at least the true vocabulary, {self.true_size}",
                                     "Pad the student's embedding and output layer, or use the tokenizer that it was made for"))
        if self.teacher_padded < self.true_size:
            raise VocabMismatch(rule("VocabSpec.teacher_padded", self.teacher_padded, f"must be at least the true vocabulary, {self.true_size}",
                                     "The teacher's head lacks tokens of this tokenizer: use the teacher's own tokenizer"))
        if self.student_padded % self.tp:
            raise VocabMismatch(rule("VocabSpec.student_padded", self.student_padded, f"must divide by the tensor-parallel size, {self.tp}",
                                     "Set model.make_vocab_size_divisible_by so that it does"))

    @property
    def shard_size(self) -> int:
        """Columns that each tensor-parallel rank of the student holds, padding included."""
        return self.student_padded // self.tp

    def shard_range(self, tp_rank: int) -> tuple[int, int]:
        """[start, end) of the token ids whose columns `tp_rank` holds, padding included."""
        if not 0 <= tp_rank < self.tp:
            raise VocabMismatch(rule("tp_rank", tp_rank, f"must be in [0, {self.tp})", "Pass the rank within the tensor-parallel group"))
        return tp_rank * self.shard_size, (tp_rank + 1) * self.shard_size

    def num_true(self, tp_rank: int) -> int:
        """Real columns on `tp_rank`: the first `num_true` of its shard; 0 where the shard is all padding."""
        start, end = self.shard_range(tp_rank)
        return max(0, min(end, self.true_size) - start)

    def teacher_rows(self, tp_rank: int) -> tuple[int, int]:
        """[start, end) of the teacher head's rows that `tp_rank` loads: its true token ids. Rows up to `shard_size` are padding."""
        start, _ = self.shard_range(tp_rank)
        start = min(start, self.true_size)
        return start, start + self.num_true(tp_rank)
