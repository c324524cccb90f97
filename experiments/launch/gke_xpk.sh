#!/bin/bash
# TPUs of a GKE cluster, by xpk (https://github.com/AI-Hypercomputer/xpk).
#
#   CLUSTER=my-cluster ZONE=us-east5-a TPU_TYPE=v5litepod-16 bash experiments/launch/gke_xpk.sh \
#     --config=configs/wmt14.py --workdir=/data/runs/wmt14
#
# Before: xpk cluster create, and an image with the packages of `.[tpu]`, which BASE_IMAGE names (the
# folder from which this is called is copied on top of it). --workdir lies on storage that all pods
# mount: xpk storage attach. What was killed (xpk restarts on status 127 to 255) is started again
# RETRIES times; where SIGTERM was heard in time, the run is saved and this command again goes on.
set -eu
: "${CLUSTER:?name of the cluster}" "${ZONE:?its zone}" "${TPU_TYPE:?such as v5litepod-16}"
arguments=$(printf '%q ' "$@")
exec xpk workload create --cluster="$CLUSTER" --zone="$ZONE" --tpu-type="$TPU_TYPE" \
  --workload="${WORKLOAD:-relpos-$(date +%m%d-%H%M%S)}" --num-slices="${SLICES:-1}" \
  --base-docker-image="${BASE_IMAGE:?an image with this code}" --script-dir=. \
  --max-restarts="${RETRIES:-3}" --termination-grace-period-seconds=60 \
  --command="python -m experiments.train --distributed $arguments"
