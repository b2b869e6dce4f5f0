#!/usr/bin/env bash
# The demo, called by `make demo`: SmolLM2-135M distilled into a student of 11 of its 30 layers, three ranks over gloo, no GPU, the teacher in a
# world of its own. Then a few steps from the same start with the teacher beside the student, and from its stored top-100, side by side.
#   DEMO_OUT   output folder (out/demo)
#   DEMO_ARGS  key=value overrides of the recipe for every part, for example DEMO_ARGS=train.iters=5
#   DEMO_LEGS  parts after the main one: "colocated cached"
#   DEMO_LEG_STEPS  their training steps (2); within the recipe's warm-up, so that their learning rates are the main run's
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
out=${DEMO_OUT:-out/demo} steps=${DEMO_LEG_STEPS:-2} recipe=recipes/demo_smollm2.yaml
export MEGATRON_KD_CACHE=${MEGATRON_KD_CACHE:-$out/models}
kd() { .venv/bin/python -m megatron_kd "$@"; }
ranks() { .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 3 -m megatron_kd "$@"; }

# shellcheck disable=SC2086  # DEMO_ARGS is a list of words
kd run "$recipe" output_dir="$out" ${DEMO_ARGS:-}

folders=("$out")
for leg in ${DEMO_LEGS-colocated cached}; do
  short=(train.iters="$steps" train.eval_iters=0 train.lr_decay=constant bridge.scheduler.lr_decay_iters=1000 teacher.placement="$leg" output_dir="$out/$leg")
  if [ "$leg" = cached ]; then
    ranks cache build "$recipe" ${DEMO_ARGS:-} "${short[@]}" cache.max_sequences=$((2 * steps))
  else
    short+=(teacher.layout=null)
  fi
  ranks train "$recipe" ${DEMO_ARGS:-} "${short[@]}"
  folders+=("$out/$leg")
done
[ ${#folders[@]} -eq 1 ] || kd compare "${folders[@]}" --json "$out/compare.json"
