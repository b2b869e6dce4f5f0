"""Bridge callbacks from plain functions, so that layers above need not import Megatron at module level."""

from collections.abc import Callable


def callback(**events: Callable):
    """A Bridge Callback that calls `events[name](context)` for each event name given, e.g. `on_train_step_start`."""
    from megatron.bridge.training.callbacks import VALID_EVENTS, Callback

    unknown = set(events) - set(VALID_EVENTS)
    assert not unknown, f"no such Bridge event: {unknown}"
    return type("DistillationCallback", (Callback,), {name: _method(function) for name, function in events.items()})()


def _method(function: Callable) -> Callable:
    return lambda self, context: function(context)


def default_forward_step() -> Callable:
    """Bridge's forward step for GPT-like models."""
    from megatron.bridge.training.gpt_step import forward_step

    return forward_step


def bind_state(forward_step: Callable, state) -> Callable:
    """A forward step of any signature that Bridge takes as `(data_iterator, model, [return_schedule_plan])`."""
    from megatron.bridge.training.utils.train_utils import prepare_forward_step_func

    return prepare_forward_step_func(forward_step, state)


def write_scalars(state, numbers: dict[str, float]) -> None:
    """Numbers under `megatron_kd/` into the run's TensorBoard and W&B writers, where this rank has them."""
    step = state.train_state.step
    if state.tensorboard_logger is not None:
        for name, value in numbers.items():
            state.tensorboard_logger.add_scalar(f"megatron_kd/{name}", value, step)
    if state.wandb_logger is not None:
        state.wandb_logger.log({f"megatron_kd/{name}": value for name, value in numbers.items()}, step)
