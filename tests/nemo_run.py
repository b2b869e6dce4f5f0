"""recipes/nemo_run/launch.py as a user starts it, with NeMo-Run from its own folder beside this environment."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = Path(sys.prefix) / "nemo_run"
START = "import runpy, sys; sys.path.append(sys.argv[1]); sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def launch(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """The finished launcher, started in `folder`; its jobs find this environment's torchrun and python."""
    assert (PACKAGES / "nemo_run").is_dir(), f"{PACKAGES} is missing: `make env` installs tools/constraints-nemo-run.txt there"
    environment = {**(environment or os.environ), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NEMORUN_HOME": str(folder / "nemo"), "OMP_NUM_THREADS": "1",
                   "COLUMNS": "500"}
    command = [sys.executable, "-c", START, str(PACKAGES), str(ROOT / "recipes/nemo_run/launch.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
