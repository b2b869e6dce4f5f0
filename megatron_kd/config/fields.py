"""Checks of single numbers, shared by the recipe's dataclasses. Torch-free."""

from megatron_kd.errors import ConfigError, rule


def positive(owner: object, *names: str) -> None:
    """ConfigError where a number that is given is not above zero."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value <= 0:
            raise ConfigError(rule(f"{type(owner).__name__}.{name}", value, "must be above 0", "Give a positive number"))


def not_negative(owner: object, *names: str) -> None:
    """ConfigError where a number that is given is below zero."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < 0:
            raise ConfigError(rule(f"{type(owner).__name__}.{name}", value, "must not be negative", "Give 0 or more"))
