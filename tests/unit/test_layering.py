"""Imports point down the layers, and only mcore imports Megatron."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_kd"
LAYERS = [
    {"errors", "vocab", "layout", "rows", "fingerprint", "objective"},
    {"kernels", "config"},
    {"loss", "stream", "cache"},
    {"plan", "mcore"},
    {"convert"},
    {"teacher"},
    {"student"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The package or top-level module that a file belongs to."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Dotted names of all absolute imports, also those inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    for name in imported(path):
        if not name.startswith("megatron_kd."):
            continue
        other = name.split(".")[1]
        assert other in LEVEL, f"{path} imports {name}: not in the layer picture"
        same_package = other == part
        bottom = LEVEL[part] == LEVEL[other] == 0
        assert same_package or bottom or LEVEL[other] < LEVEL[part], f"{path} ({part}) imports {name}: not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_mcore_imports_megatron(path):
    if part_of(path) == "mcore":
        return
    foreign = {n for n in imported(path) if n == "megatron" or n.startswith("megatron.")}
    assert not foreign, f"{path} imports {foreign}; only megatron_kd.mcore may"


@pytest.mark.parametrize("name", ["nixl", "fsspec", "gguf", "liger_kernel", "transformer_engine"])
def test_optional_dependency_is_imported_in_one_package(name):
    users = {part_of(p) for p in FILES if any(n == name or n.startswith(name + ".") for n in imported(p))}
    assert len(users) <= 1, f"{name} is imported by {users}"
