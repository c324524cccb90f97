#!/bin/bash
# TPUs of a GKE cluster, by xpk (https://github.com/AI-Hypercomputer/xpk).
#
#   CLUSTER=my-cluster ZONE=us-east5-a TPU_TYPE=v5litepod-16 bash experiments/launch/gke_xpk.sh \
#     --config=configs/wmt14.py --workdir=/data/runs/wmt14
#
# Before: `xpk cluster create`, and an image BASE_IMAGE with the packages of `.[tpu]`; the current
# folder is copied on top of it. --workdir must be on storage that all pods mount: `xpk storage
# attach`. xpk restarts a killed training RETRIES times. A run that received SIGTERM is saved; the
# same command resumes it.
set -eu
: "${CLUSTER:?name of the cluster}" "${ZONE:?its zone}" "${TPU_TYPE:?such as v5litepod-16}"
arguments=$(printf '%q ' "$@")
exec xpk workload create --cluster="$CLUSTER" --zone="$ZONE" --tpu-type="$TPU_TYPE" \
  --workload="${WORKLOAD:-relpos-$(date +%m%d-%H%M%S)}" --num-slices="${SLICES:-1}" \
  --base-docker-image="${BASE_IMAGE:?an image with this code}" --script-dir=. \
  --max-restarts="${RETRIES:-3}" --termination-grace-period-seconds=60 \
  --command="python -m experiments.train --distributed $arguments"
