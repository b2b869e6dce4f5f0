"""Fixtures shared by all tests: rank pools (see tests/harness.py) and the rules for skipping."""

import contextlib
import subprocess
from pathlib import Path

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


@pytest.fixture
def small_disk():
    """`with small_disk(directory, "2m"):` a file system of that size in `directory`; skipped, with the reason, where mounting is not allowed."""

    @contextlib.contextmanager
    def mount(directory: Path, size: str):
        directory.mkdir(exist_ok=True)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"this user or container may not mount: {mounted.stderr.strip()}")
        try:
            yield directory
        finally:
            subprocess.run(["umount", str(directory)], check=True)

    return mount


def pytest_collection_modifyitems(items):
    """GPU tests are skipped, with the reason, where there is no GPU; they run on the GPU machine before an issue is resolved."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
