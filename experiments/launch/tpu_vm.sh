#!/bin/bash
# Creates a Cloud TPU VM or slice from your own machine, and trains on all its workers.
#
#   TPU=my-tpu ZONE=us-east5-a bash experiments/launch/tpu_vm.sh \
#     --config=configs/wmt14.py --workdir=gs://my-bucket/runs/wmt14
#
# TYPE (default v5litepod-16) and VERSION (default v2-alpha-tpuv5-lite; v2-alpha-tpuv6e
# for v6e) choose the VM. It is a spot VM unless SPOT=no. A queued resource with the
# name $TPU waits for capacity. A wrong zone, a missing quota or an expired login ends
# this script. uv installs Python 3.12, because the images have older versions.
# --workdir must be in gs://, or a folder that all workers share. A preempted VM is
# requested again, and the training resumes. Ctrl-C here does not stop the training
# there. Delete the VM yourself:
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
# flock, because the old training may still run after a broken connection.
train="cd relpos_jax && exec flock .running .venv/bin/python -m experiments.launch --retries=${RETRIES:-3} -- \
  python -m experiments.train --distributed $arguments"

status=0
while true; do
  if ! state=$(queue describe --format='value(state.state)' 2>"$errors"); then
    grep -q NOT_FOUND "$errors" || { cat "$errors" >&2; exit 1; }
    # shellcheck disable=SC2086  # empty or one word
    queue create --node-id="$TPU" --accelerator-type="${TYPE:-v5litepod-16}" \
      --runtime-version="${VERSION:-v2-alpha-tpuv5-lite}" $spot
    continue
  fi
  case $state in
    ACTIVE) [[ ! $status =~ ^13 ]] || exit "$status" ;;  # it was not the VM's end
    SUSPENDED) status=0; queue delete --force --quiet; continue ;;  # preempted
    FAILED) queue describe >&2; exit 1 ;;
    *) echo "$TPU: $state" >&2; sleep "$WAIT"; continue ;;
  esac
  status=0
  tpu scp "$code" "$TPU:relpos_jax.tar.gz" &&
    tpu ssh "$TPU" --command="$install" && tpu ssh "$TPU" --command="$train" || status=$?
  # Killed in spite of all retries, stopped by SIGTERM as before a preemption, or (255)
  # disconnected.
  [[ $status =~ ^(134|137|139|143|255)$ ]] || exit "$status"
  sleep "$WAIT"
done
