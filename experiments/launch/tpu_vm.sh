#!/bin/bash
# A Cloud TPU VM or a slice of them: the same command on all workers, from your own machine.
#
#   TPU=my-tpu ZONE=us-east5-a bash experiments/launch/tpu_vm.sh \
#     --config=configs/wmt14.py --workdir=gs-mounted/runs/wmt14
#
# Before: gcloud compute tpus tpu-vm create $TPU --zone=$ZONE --accelerator-type=v5litepod-16
#   --version=v2-alpha-tpuv5-lite, and the code and `pip install -e '.[tpu]'` on every worker:
#   gcloud compute tpus tpu-vm ssh $TPU --zone=$ZONE --worker=all --command='...'
# --workdir is a folder that all workers see (Filestore, or a bucket mounted by gcsfuse): the first
# worker writes the run, all of them its checkpoints. SIGTERM, which precedes a preemption, saves;
# this command again goes on.
set -eu
: "${TPU:?name of the TPU}" "${ZONE:?its zone}"
arguments=$(printf '%q ' "$@")
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
  --command="cd ${FOLDER:-relpos_jax} && python -m experiments.launch --retries=${RETRIES:-3} -- \
    python -m experiments.train --distributed $arguments"
