"""megatron_kd: knowledge distillation at scale for Megatron-Core and Megatron-Bridge.

Two names are public: `fused_linear_kd` (the loss, no Megatron needed) and `attach` (the Megatron-Bridge side). Both load on first use,
so importing the package has no side effects.
"""

__version__ = "0.1.0"
__all__ = ["attach", "fused_linear_kd"]


def __getattr__(name: str):
    if name == "fused_linear_kd":
        from megatron_kd.loss.fused import fused_linear_kd

        return fused_linear_kd
    if name == "attach":
        from megatron_kd.student.attach import attach

        return attach
    raise AttributeError(f"module 'megatron_kd' has no attribute {name!r}")
