"""MXFP4, the format of GPT-OSS's released expert weights: 32 values of 4 bits (E2M1) share one power-of-two scale (E8M0).

Owns packing and unpacking. `X_blocks` is uint8 [..., G, 16] (low nibble first), `X_scales` uint8 [..., G] (exponent + 127);
they unpack to [..., 32 * G]. A checkpoint holds `X_blocks` and `X_scales` where a plain one holds `X`, with the last two
dimensions swapped against transformers' bf16 layout. Called by the checkpoint tools. Source: OCP Microscaling Formats (MX) v1.0.
"""

import torch

from megatron_kd.convert.hf_index import Checkpoint
from megatron_kd.errors import ConvertError, rule

BLOCKS, SCALES = "_blocks", "_scales"
VALUES_PER_BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0..7; bit 3 is the sign."""


def unpack(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[..., G, 16] uint8 and [..., G] uint8 -> [..., 32 * G] of `dtype`; exact in bf16."""
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != VALUES_PER_BLOCK // 2:
        raise ConvertError(rule("MXFP4 blocks and scales", (tuple(blocks.shape), tuple(scales.shape)), "must be [..., G, 16] and [..., G]",
                                "Check that both come from the same shard set"))
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=dtype)
    pairs = torch.stack((table[(blocks & 0xF).long()], table[(blocks >> 4).long()]), dim=-1)
    values = torch.ldexp(pairs.flatten(-2), (scales.to(torch.int32) - 127).unsqueeze(-1))
    return values.to(dtype).flatten(-2)


def pack(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., 32 * G] -> (blocks, scales): scale 2^(floor(log2(max)) - 2), values rounded to nearest, ties to even code, clipped at 6."""
    if values.shape[-1] % VALUES_PER_BLOCK:
        raise ConvertError(rule("last dimension", values.shape[-1], f"must divide by {VALUES_PER_BLOCK}", "Choose widths that are multiples of 32"))
    groups = values.float().unflatten(-1, (-1, VALUES_PER_BLOCK))
    _, exponent = torch.frexp(groups.abs().amax(-1))
    exponent = (exponent - 1 - 2).clamp(-127, 127)
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1))
    table = torch.tensor(E2M1)
    midpoints = (table[1:] + table[:-1]) / 2
    magnitude = scaled.abs().contiguous()
    below, above = torch.bucketize(magnitude, midpoints, right=False), torch.bucketize(magnitude, midpoints, right=True)
    code = torch.where(below % 2 == 0, below, above).to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4), (exponent + 127).to(torch.uint8)


def is_packed(checkpoint: Checkpoint, name: str) -> bool:
    """Whether the checkpoint stores `name` in MXFP4."""
    return name not in checkpoint.specs and name + BLOCKS in checkpoint.specs


def read_plain(checkpoint: Checkpoint, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
    """The tensor in transformers' bf16 layout, from plain or MXFP4 storage; `rows` are experts (dimension 0)."""
    if not is_packed(checkpoint, name):
        return checkpoint.read(name, rows)
    values = unpack(checkpoint.read(name + BLOCKS, rows), checkpoint.read(name + SCALES, rows))
    return values.transpose(-1, -2).contiguous()
