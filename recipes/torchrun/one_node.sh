#!/usr/bin/env bash
# One node, teacher beside the student or cached: recipes/torchrun/one_node.sh RECIPE GPUS [key=value ...]
# (Streamed recipes on one node: `megatron-kd run RECIPE` starts and supervises both sides.)
set -euo pipefail
recipe=$1 gpus=$2
shift 2
placement=$(python3 -m megatron_kd train "$recipe" --print-config "$@" | sed -n 's/^  placement: //p')
if [ "$placement" = cached ]; then # found and left alone where it is complete
  torchrun --nproc-per-node "$gpus" -m megatron_kd cache build "$recipe" "$@"
fi
exec torchrun --nproc-per-node "$gpus" -m megatron_kd train "$recipe" "$@"
