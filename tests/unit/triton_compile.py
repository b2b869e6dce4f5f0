"""Compiles a row kernel for an H100/H200 on a machine without a GPU, as its launcher would at a vocabulary of bf16 logits."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_kd.kernels import triton_rows, triton_topk, tuning

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"student": "*bf16", "teacher": "*bf16", "labels": "*i32", "out": "*fp32", "joined": "*fp32", "weights": "*fp32",
            "stats": "*fp32", "lse": "*fp32", "coef": "*fp32", "ids": "*i64", "log_p": "*fp32", "tail": "*fp32", "grad": "*fp32"}
FLOATS = ("tau", "mix", "kd_coef", "ce_coef", "scale_s", "cap_s", "scale_t", "cap_t")
DIVISIBLE = ("student", "teacher", "stride_s", "stride_t", "num_columns")
"""Not num_true: a tokenizer's size is any number, and must not cost the wide loads."""
CONSTANTS = {"HAS_LABELS": True, "HAS_CE": True, "TRANSFORM_S": 2, "TRANSFORM_T": 1, "TAU_ONE": False, "CROSS_OF": "forward_kl", "DIVERGENCE": "jsd",
             "WITH_LABEL": True, "MODE": "tail_bucket", "BLOCK_K": 128}
TUNED = {"row_stats_kernel": tuning.STATS, "tail_stats_kernel": tuning.STATS, "row_values_kernel": tuning.VALUES, "row_grad_kernel": tuning.GRAD,
         "tail_grad_kernel": tuning.GRAD, "join_stats_kernel": tuning.JOIN, "top_k_take_kernel": tuning.TOP_K, "top_k_join_kernel": tuning.TOP_K,
         "top_k_put_kernel": tuning.TOP_K}


def compile_for_hopper(name: str):
    """The compiled kernel with its PTX, with the launch constants in use and the costliest choice of the others."""
    kernel = getattr(triton_rows, name, None) or getattr(triton_topk, name)
    tuned = dict(TUNED[name])
    constants = {**CONSTANTS, "BLOCK": tuned.pop("BLOCK", 0)}
    signature = {}
    for argument in kernel.arg_names:
        kind = POINTERS.get(argument) or ("fp32" if argument in FLOATS else "i32")
        signature[argument] = "constexpr" if argument in constants else kind
    position = {argument: (i,) for i, argument in enumerate(kernel.arg_names)}
    source = ASTSource(kernel, signature, {position[a]: v for a, v in constants.items() if a in position},
                       {position[a]: [["tt.divisibility", 16]] for a in DIVISIBLE if a in position})
    return triton.compile(source, target=HOPPER, options=tuned)
