"""tools/make_env.sh: says what is missing where there is no Python 3.12, and finds one that is named or lies in pyenv's place."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "dirname", "cat", "sha256sum", "cut", "touch")


@pytest.fixture
def bare(tmp_path):
    """An environment whose PATH has no Python."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}


def make_env(environment: dict, venv: Path) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", str(ROOT / "tools" / "make_env.sh"), str(venv)], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(any(os.path.exists(f"/usr/{d}bin/python3.12") for d in ("", "local/")), reason="a system Python 3.12 cannot be hidden")
def test_missing_python_is_named_with_the_ways_to_get_it(bare, tmp_path):
    done = make_env(bare, tmp_path / "venv")
    assert done.returncode == 1 and not (tmp_path / "venv").exists()
    assert all(words in done.stderr for words in ("Python 3.12 with venv is missing", "pyenv install 3.12", "apt-get install", "PYTHON=")), (
        done.stderr
    )


@pytest.mark.parametrize("place", ["PYTHON", "pyenv"])
def test_python_is_found_where_it_is(bare, tmp_path, place):
    """An environment that is up to date is left as it is, so finding Python is all that is left to do."""
    venv = tmp_path / "venv"
    venv.mkdir()
    sources = b"".join((ROOT / name).read_bytes() for name in ("tools/constraints-cpu.txt", "tools/constraints-nemo-run.txt", "setup.py", "tools/make_env.sh"))
    import hashlib

    (venv / ".pins").write_text(hashlib.sha256(sources).hexdigest())
    if place == "PYTHON":
        bare["PYTHON"] = sys.executable
    else:
        versions = tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin"
        versions.mkdir(parents=True)
        (versions / "python").symlink_to(sys.executable)
    done = subprocess.run(["bash", "tools/make_env.sh", str(venv)], env=bare, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
