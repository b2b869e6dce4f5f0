"""Identity of a teacher: what both sides of a stream must agree on, read from its checkpoint folder.

Owns the reading; the comparison is stream/spec.py's. Called by the serving replica and by the student, which both have the folder (the
student reads its shard of the head from it). Only config and head are read here, unless the full fingerprint must be computed.
"""

from dataclasses import dataclass
from pathlib import Path

from megatron_kd.convert.head import find_head
from megatron_kd.convert.hf_index import Checkpoint
from megatron_kd.fingerprint import cached_fingerprint, tensor_digest
from megatron_kd.stream.wire import Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One teacher."""

    fingerprint: str | None
    """Full fingerprint; None where it was neither remembered nor asked for."""
    head_digest: str
    """Of the output head's contents, weight and bias."""
    head_transform: str
    """Scale, soft-cap and bias of the head as one text."""
    hidden_size: int
    """H_t."""
    context_length: int
    """Longest sequence that its configuration allows."""

    def agreement(self, wire_dtype: str) -> Agreement:
        """What a replica announces. Its fingerprint must be known."""
        assert self.fingerprint is not None
        return Agreement(fingerprint=self.fingerprint, head_transform=self.head_transform, hidden_size=self.hidden_size, wire_dtype=wire_dtype)


def identify(path: str | Path, *, compute_fingerprint: bool, context_length: int | None = None) -> Identity:
    """Errors: ConvertError where config or head cannot be read. Costs one read of the head; of all weights where the fingerprint is computed."""
    checkpoint = Checkpoint.open(path)
    head = find_head(checkpoint)
    digest = tensor_digest(checkpoint.read(head.name)).hex()
    if head.bias is not None:
        digest += tensor_digest(checkpoint.read(head.bias)).hex()
    longest = checkpoint.text_config.get("max_position_embeddings")
    return Identity(fingerprint=cached_fingerprint(path, compute=compute_fingerprint), head_digest=digest, hidden_size=head.width,
                    head_transform=f"scale={head.logit_scale:g} softcap={head.soft_cap or 0:g} bias={'yes' if head.bias else 'no'}",
                    context_length=context_length or int(longest or 2**31 - 1))
