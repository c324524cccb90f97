#!/bin/bash
# Cloud TPU: runs the same command on all workers of a TPU VM or slice, from your own machine.
#
#   TPU=my-tpu ZONE=us-east5-a bash experiments/launch/tpu_vm.sh \
#     --config=configs/wmt14.py --workdir=gs-mounted/runs/wmt14
#
# Before: gcloud compute tpus tpu-vm create $TPU --zone=$ZONE --accelerator-type=v5litepod-16
#   --version=v2-alpha-tpuv5-lite, and the code and `pip install -e '.[tpu]'` on every worker:
#   gcloud compute tpus tpu-vm ssh $TPU --zone=$ZONE --worker=all --command='...'
# --workdir must be a folder that all workers share (Filestore, or a bucket mounted by gcsfuse).
# SIGTERM, which precedes a preemption, saves the run; the same command resumes it.
set -eu
: "${TPU:?name of the TPU}" "${ZONE:?its zone}"
arguments=$(printf '%q ' "$@")
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
  --command="cd ${FOLDER:-relpos_jax} && python -m experiments.launch --retries=${RETRIES:-3} -- \
    python -m experiments.train --distributed $arguments"
