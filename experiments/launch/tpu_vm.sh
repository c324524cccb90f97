#!/bin/bash
# Cloud TPU: creates a TPU VM or slice and trains on all its workers, from your own machine.
#
#   TPU=my-tpu ZONE=us-east5-a bash experiments/launch/tpu_vm.sh \
#     --config=configs/wmt14.py --workdir=gs://my-bucket/runs/wmt14
#
# TYPE (v5litepod-16) and VERSION (v2-alpha-tpuv5-lite; for v6e v2-alpha-tpuv6e) say what to create;
# a spot VM unless SPOT=no. Creation is tried again every minute. uv brings Python 3.12,
# since images have older ones. --workdir must be in gs:// or a folder that all workers share.
# A preempted VM is replaced, and the training resumes. Ctrl-C here does not stop it there. The VM is
# yours to delete.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${TPU:?name of the TPU}" "${ZONE:?its zone}" "${WAIT:=60}"
tpu() { gcloud compute tpus tpu-vm "$1" "${@:2}" --zone="$ZONE"; }
spot=(--spot)
[[ ${SPOT:-} != no ]] || spot=()
code=$(mktemp) arguments=$(printf '%q ' "$@")
trap 'rm -f "$code"' EXIT
git ls-files -z --cached --others --exclude-standard | tar --create --gzip --null --files-from=- --file="$code"

# shellcheck disable=SC2016  # the worker expands it
install='mkdir -p relpos_jax && tar -xzf relpos_jax.tar.gz -C relpos_jax && cd relpos_jax &&
  export PATH="$HOME/.local/bin:$PATH" &&
  { command -v uv || curl -LsSf https://astral.sh/uv/install.sh | sh; } &&
  uv venv --allow-existing --python=3.12 && uv pip install --quiet -e ".[tpu,experiments]"'
# flock: after a broken connection the old training may still run, and the new one waits for it.
train="cd relpos_jax && exec flock .running .venv/bin/python -m experiments.launch --retries=${RETRIES:-3} -- \
  python -m experiments.train --distributed $arguments"

while true; do
  state=$(tpu describe "$TPU" --format='value(state)' || true)
  case $state in
    READY) ;;
    PREEMPTED | TERMINATED) tpu delete "$TPU" --quiet || sleep "$WAIT"; continue ;;
    "")
      tpu create "$TPU" --accelerator-type="${TYPE:-v5litepod-16}" \
        --version="${VERSION:-v2-alpha-tpuv5-lite}" "${spot[@]}" || sleep "$WAIT"
      continue ;;
    *) sleep "$WAIT" && continue ;;
  esac
  status=0
  tpu scp "$code" "$TPU:relpos_jax.tar.gz" --worker=all &&
    tpu ssh "$TPU" --worker=all --command="$install" &&
    tpu ssh "$TPU" --worker=all --command="$train" || status=$?
  # Killed, stopped by SIGTERM as before a preemption, or (255) the connection broke.
  [[ $status =~ ^(134|137|143|255)$ ]] || exit "$status"
  sleep "$WAIT"
done
