"""The Triton row kernels compiled for Hopper. Needs no GPU: Triton brings its own assembler."""

import pytest

from tests.unit.triton_compile import compile_for_hopper


@pytest.mark.parametrize("kernel", ["row_stats_kernel", "row_grad_kernel", "row_values_kernel", "tail_stats_kernel", "tail_grad_kernel",
                                    "join_stats_kernel",
                                    "top_k_take_kernel", "top_k_join_kernel", "top_k_put_kernel"])
def test_kernel_compiles_for_hopper_with_16_byte_accesses_and_without_spills(kernel):
    compiled = compile_for_hopper(kernel)
    assert "st.local" not in compiled.asm["ptx"] and "ld.local" not in compiled.asm["ptx"]
    if kernel.startswith(("row", "tail")):
        assert ".v4.b32" in compiled.asm["ptx"], "logits must be loaded 16 bytes at a time"


def test_scale_compiles_for_hopper():
    import triton
    from triton.compiler import ASTSource

    from megatron_kd.kernels import triton_scale, tuning
    from tests.unit.triton_compile import HOPPER

    options = dict(tuning.SCALE)
    source = ASTSource(triton_scale.scale_kernel, {"source": "*fp32", "factor": "*fp32", "target": "*bf16", "num": "i32", "BLOCK": "constexpr"},
                       {(4,): options.pop("BLOCK")}, {(i,): [["tt.divisibility", 16]] for i in (0, 2, 3)})
    assert ".v4.b32" in triton.compile(source, target=HOPPER, options=options).asm["ptx"]
