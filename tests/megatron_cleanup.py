"""Global state of Megatron-Core and Bridge that one job of a rank pool leaves behind for the next."""

import sys


def cleanup() -> None:
    """Destroy parallel groups, micro-batch calculator, rerun state and the log of multi-token prediction; safe to call twice."""
    import megatron.core.num_microbatches_calculator as calculator
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    calculator.destroy_num_microbatches_calculator()
    if "megatron.core.rerun_state_machine" in sys.modules:
        from megatron.core.rerun_state_machine import destroy_rerun_state_machine

        destroy_rerun_state_machine()
    if "megatron.core.transformer.multi_token_prediction" in sys.modules:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        MTPLossLoggingHelper.tracker.clear()  # sized by the first model's depths
