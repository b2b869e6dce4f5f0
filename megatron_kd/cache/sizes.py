"""Bytes of the cache: a token in the store, before anything is stored, and a micro-batch's rows in memory. Torch-free.

`megatron-kd cache stat` gives what a real store holds; tests compare the two. The planner counts the rows in memory.
"""

import math
from typing import Literal


def topk_bytes_per_token(k: int, vocab_size: int, precision: Literal["bf16", "fp32"] = "bf16") -> float:
    """Upper estimate of coded bytes a row. Ids: entropy of a uniformly random K-subset, log2 C(V, K) bits, times 1.03 for byte planes;
    real teachers prefer low ids and come out lower. Log-probabilities: 10 of 16 bits (bf16; the exponent's byte has few values) or
    all but 5 of 32 (fp32). Tail: 4 bytes."""
    id_bits = (math.lgamma(vocab_size + 1) - math.lgamma(k + 1) - math.lgamma(vocab_size - k + 1)) / math.log(2)
    return 1.03 * id_bits / 8 + k * (10 if precision == "bf16" else 27) / 8 + 4


def topk_block_bytes(num_rows: int, k: int) -> int:
    """A TopKBlock as the reader makes it: int64 ids and fp32 log-probabilities [N, K], fp32 tail and int64 row ids [N]."""
    return num_rows * (k * (8 + 4) + 4 + 8)


def hidden_bytes_per_token(hidden_size: int, precision: Literal["bf16", "fp32", "fp8"] = "bf16") -> float:
    """Upper estimate: 11.5 of 16 bits for bf16 (the exponent's byte compresses), fp32 uncompressed, one byte a value and a scale for fp8."""
    return {"bf16": hidden_size * 11.5 / 8, "fp32": hidden_size * 4.0, "fp8": hidden_size * 1.0 + 4}[precision]


def raw_bitpacked_bytes_per_token(k: int, vocab_size: int) -> float:
    """What fixed-width ids would take with bf16 log-probabilities and an fp32 tail: the figure that the coding is measured against."""
    return k * (math.ceil(math.log2(vocab_size)) + 16) / 8 + 4
