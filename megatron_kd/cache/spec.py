"""PayloadSpec: what one stored row is. Torch-free; part of every shard's header.

Called by codec, writer, reader and the commands. A store may hold several specs and contexts side by side; a `Collection` is one pair.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

from megatron_kd.cache.key import CacheContext
from megatron_kd.errors import CacheCorrupt, ConfigError, rule


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSpec:
    """Kind, width and precision of stored rows. Errors: ConfigError where fields contradict each other."""

    kind: Literal["topk", "sampled", "hidden"]
    """topk: the K largest log-probabilities and the mass outside; sampled: K draws as importance weights; hidden: rows before the head."""
    width: int
    """K for topk and sampled, H_t for hidden."""
    precision: Literal["bf16", "fp32", "fp8"] = "bf16"
    """Of log-probabilities (bf16, fp32), weights of draws (fp32; they repeat and compress) or hidden rows (also fp8 e4m3, one fp32 scale a row). Token ids and tail mass are always exact."""
    vocab_size: int
    """The teacher's true vocabulary: K never exceeds it, ids stay below it."""

    def __post_init__(self):
        if self.kind not in ("topk", "sampled", "hidden"):
            raise ConfigError(rule("cache payload", self.kind, "must be topk, sampled or hidden", "Set cache.payload and cache.selection"))
        allowed = {"hidden": ("bf16", "fp32", "fp8"), "topk": ("bf16", "fp32"), "sampled": ("fp32",)}[self.kind]
        if self.precision not in allowed:
            raise ConfigError(rule("cache precision", self.precision, f"must be one of {', '.join(allowed)} for {self.kind}", "Set cache.log_probs or cache.hidden_rows"))
        if not 1 <= self.vocab_size <= 2**32:
            raise ConfigError(rule("vocab_size", self.vocab_size, "must be in [1, 2^32]", "Token ids are stored as 32-bit numbers"))
        if self.width < 1 or (self.kind != "hidden" and self.width > self.vocab_size):
            raise ConfigError(rule("cache.k" if self.kind != "hidden" else "hidden width", self.width,
                                   f"must be at least 1 and at most the vocabulary, {self.vocab_size}", "Lower cache.k"))

    def describe(self) -> str:
        """Short text, e.g. `topk K=100 bf16`."""
        letter = "H" if self.kind == "hidden" else "K"
        return f"{self.kind} {letter}={self.width} {self.precision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """One context with one payload: all records of a shard belong to it."""

    context: CacheContext
    """Who answered."""
    spec: PayloadSpec
    """What a row is."""

    @property
    def digest(self) -> str:
        """16 hexadecimal digits; begins the names of its shards."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Canonical text, read back by from_json."""
        return json.dumps({"context": asdict(self.context), "spec": asdict(self.spec)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Collection":
        """Errors: CacheCorrupt where the text is not one of ours."""
        try:
            parsed = json.loads(text)
            return cls(context=CacheContext(**parsed["context"]), spec=PayloadSpec(**parsed["spec"]))
        except (ValueError, TypeError, KeyError) as e:
            raise CacheCorrupt(rule("collection header", text[:80], f"cannot be read ({e})", "Run `megatron-kd cache verify`, then `cache repair`")) from e
