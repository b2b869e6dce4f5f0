"""Extraction of a model's output head, tied or not, without reading anything else.

Owns finding the head and its transform. The result is a directory with `head.safetensors` (tensor `weight` [V, H], `bias` [V]
where there is one) and `head.json`. Called by the CLI and by whoever needs a head's shape before loading it.
"""

from dataclasses import dataclass
from pathlib import Path

from megatron_kd.convert.hf_index import Checkpoint
from megatron_kd.convert.writer import CheckpointWriter, Progress
from megatron_kd.errors import ConvertError, rule

HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.language_model.lm_head.weight", "output.weight", "embed_out.weight")
EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight",
              "transformer.wte.weight", "transformer.word_embeddings.weight", "tok_embeddings.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where a checkpoint keeps its output head, and what is applied to its logits."""

    name: str
    """Tensor [V, H]; the embedding where tied."""
    bias: str | None
    """Tensor [V], or None."""
    tied: bool
    """Whether the embedding is the head."""
    num_rows: int
    """V, padding rows of the checkpoint included."""
    width: int
    """H."""
    soft_cap: float | None
    """logits = cap * tanh(logits / cap), after scaling; None for none."""
    logit_scale: float
    """logits = scale * (hidden @ weight.T)."""


def find_head(checkpoint: Checkpoint) -> Head:
    """The output head. Errors: ConvertError where config and weights do not say which tensor it is."""
    tie = checkpoint.config.get("tie_word_embeddings", checkpoint.text_config.get("tie_word_embeddings"))
    own = next((name for name in HEADS if name in checkpoint.specs), None)
    embedding = next((name for name in EMBEDDINGS if name in checkpoint.specs), None)
    tied = bool(tie) or (own is None and tie is None)
    name = embedding if tied else own
    if name is None:
        raise ConvertError(rule("output head", f"tie_word_embeddings = {tie}", f"no tensor of {EMBEDDINGS if tied else HEADS} is in {checkpoint.path}",
                                "Check that the shards belong to this config"))
    shape = checkpoint.spec(name).shape
    if len(shape) != 2:
        raise ConvertError(rule(f"shape of {name}", shape, "an output head must be [vocabulary, hidden]", "Check the checkpoint"))
    bias = name.removesuffix("weight") + "bias"
    soft_cap, scale = head_transform(checkpoint.text_config)
    return Head(name=name, bias=bias if not tied and bias in checkpoint.specs else None, tied=tied, num_rows=shape[0], width=shape[1],
                soft_cap=soft_cap, logit_scale=scale)


def head_transform(text_config: dict) -> tuple[float | None, float]:
    """(soft cap, scale) of a config's logits, in the names that transformers' families use (Gemma, Cohere, Granite)."""
    scale = float(text_config.get("logit_scale") or 1.0) / float(text_config.get("logits_scaling") or 1.0)
    return text_config.get("final_logit_softcapping"), scale


def extract_head(source: str | Path, target: str | Path, *, overwrite: bool = False, progress: Progress | None = None) -> Head:
    """Write the head of `source` to the directory `target`. Reads only the head; the peak is the head itself."""
    checkpoint = Checkpoint.open(source)
    head = find_head(checkpoint)
    wanted = checkpoint.spec(head.name).num_bytes
    with CheckpointWriter(target, stem="head", max_shard_bytes=wanted + (1 << 30), expected_bytes=wanted, overwrite=overwrite, progress=progress) as writer:
        writer.add("weight", checkpoint.read(head.name))
        if head.bias is not None:
            writer.add("bias", checkpoint.read(head.bias))
        writer.add_json("head.json", {
            "source": Path(source).name, "tensor": head.name, "tied": head.tied, "vocab_rows": head.num_rows, "hidden_size": head.width,
            "soft_cap": head.soft_cap, "logit_scale": head.logit_scale, "architectures": checkpoint.config.get("architectures"),
        })
    return head
