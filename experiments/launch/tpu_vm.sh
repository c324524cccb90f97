#!/bin/bash
# Cloud TPU: creates a TPU VM or slice and trains on all its workers, from your own machine.
#
#   TPU=my-tpu ZONE=us-east5-a bash experiments/launch/tpu_vm.sh \
#     --config=configs/wmt14.py --workdir=gs://my-bucket/runs/wmt14
#
# TYPE (v5litepod-16) and VERSION (v2-alpha-tpuv5-lite; for v6e v2-alpha-tpuv6e) say what to ask for;
# a spot VM unless SPOT=no. A queued resource of the name $TPU waits for capacity; a wrong zone, a
# missing quota or an expired login ends this script. uv brings Python 3.12, since images have older
# ones. --workdir must be in gs:// or a folder that all workers share. A preempted VM is asked for
# again, and the training resumes. Ctrl-C here does not stop it there. The VM is yours to delete:
# gcloud compute tpus queued-resources delete $TPU --zone=$ZONE --force
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${TPU:?name of the TPU}" "${ZONE:?its zone}" "${WAIT:=60}"
tpu() { gcloud compute tpus tpu-vm "$@" --zone="$ZONE" --worker=all; }
queue() { gcloud compute tpus queued-resources "$1" "$TPU" "${@:2}" --zone="$ZONE"; }
spot=--spot
[[ ${SPOT:-} != no ]] || spot=
code=$(mktemp) errors=$(mktemp) arguments=$(printf '%q ' "$@")
trap 'rm -f "$code" "$errors"' EXIT
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
  if ! state=$(queue describe --format='value(state.state)' 2>"$errors"); then
    grep -q NOT_FOUND "$errors" || { cat "$errors" >&2; exit 1; }
    # shellcheck disable=SC2086  # empty or one word
    queue create --node-id="$TPU" --accelerator-type="${TYPE:-v5litepod-16}" \
      --runtime-version="${VERSION:-v2-alpha-tpuv5-lite}" $spot
    continue
  fi
  case $state in
    ACTIVE) ;;
    SUSPENDED) queue delete --force --quiet; continue ;;  # preempted
    FAILED) queue describe >&2; exit 1 ;;
    *) echo "$TPU: $state" >&2; sleep "$WAIT"; continue ;;
  esac
  status=0
  tpu scp "$code" "$TPU:relpos_jax.tar.gz" &&
    tpu ssh "$TPU" --command="$install" && tpu ssh "$TPU" --command="$train" || status=$?
  # Killed, stopped by SIGTERM as before a preemption, or (255) the connection broke.
  [[ $status =~ ^(134|137|143|255)$ ]] || exit "$status"
  sleep "$WAIT"
done
