"""Launch constants of the Triton kernels. Plain numbers, one place; imports nothing.

Chosen on an H200 (docs/benchmarks/notes.md holds what was tried). BLOCK counts columns (rows for JOIN).
"""

STATS = {"BLOCK": 4096, "num_warps": 8}
"""row_stats and tail_stats: one row a program, BLOCK columns a step."""
VALUES = {"BLOCK": 4096, "num_warps": 8}
"""row_values: as STATS."""
GRAD = {"BLOCK": 4096, "num_warps": 8}
"""row_grad and tail_grad: BLOCK columns of one row a program."""
JOIN = {"BLOCK": 128, "num_warps": 4}
"""join_stats: BLOCK rows a program."""
TOP_K = {"num_warps": 4}
"""The top-K kernels on R x K numbers: one row a program."""
SCALE = {"BLOCK": 4096, "num_warps": 8}
"""scale: BLOCK elements a program."""
