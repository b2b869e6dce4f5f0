#!/usr/bin/env bash
# The demo: SmolLM2-135M distilled into a student of 11 of its 30 layers, three ranks over gloo, no GPU. Called by `make demo`;
# further key=value arguments override the recipe (DEMO_ARGS for make), for example `DEMO_ARGS=train.iters=3 make demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/torchrun --standalone --nproc-per-node 3 -m megatron_kd train recipes/demo_smollm2.yaml ${DEMO_ARGS:-} "$@"
