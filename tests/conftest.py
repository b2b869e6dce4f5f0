"""Fixtures shared by all tests: rank pools (see tests/harness.py) and the rules for skipping."""

import pytest
import torch

from tests.harness import RankPool


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(fn, world, timeout_s=60, **kwargs)` on plain torch processes over gloo."""
    pool = RankPool("torch")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def megatron_ranks():
    """The same with Megatron-Core and Bridge imported on the CPU runtime."""
    pool = RankPool("megatron")
    yield pool
    pool.close()


def pytest_collection_modifyitems(items):
    """GPU tests are skipped, with the reason, where there is no GPU; they run on the GPU machine before an issue is resolved."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
