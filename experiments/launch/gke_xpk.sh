#!/bin/bash
# Trains on TPUs of a GKE cluster, by xpk (https://github.com/AI-Hypercomputer/xpk).
#
#   CLUSTER=my-cluster ZONE=us-east5-a TPU_TYPE=v5litepod-16 bash experiments/launch/gke_xpk.sh \
#     --config=configs/wmt14.py --workdir=gs://my-bucket/runs/wmt14
#
# First make the cluster: `xpk cluster create`. The current folder is copied on top of
# BASE_IMAGE (default python:3.12). An image with the packages of `.[tpu,experiments]`
# starts sooner. --workdir must be in gs://, or on storage that all pods mount: `xpk
# storage attach`. After a preemption, which SIGTERM announces, or a kill, the training
# starts again and resumes, up to RETRIES times.
set -eu
: "${CLUSTER:?name of the cluster}" "${ZONE:?its zone}" "${TPU_TYPE:?such as v5litepod-16}"
arguments=$(printf '%q ' "$@")
# exec, because xpk sends SIGTERM to the command alone. xpk restarts its status, 143.
exec xpk workload create --cluster="$CLUSTER" --zone="$ZONE" --tpu-type="$TPU_TYPE" \
  --workload="${WORKLOAD:-relpos-$(date +%m%d-%H%M%S)}" --num-slices="${SLICES:-1}" \
  --base-docker-image="${BASE_IMAGE:-python:3.12}" --script-dir=. \
  --max-restarts="${RETRIES:-3}" --termination-grace-period-seconds=60 \
  --command="pip install --quiet -e '.[tpu,experiments]' && \
exec python -m experiments.train --distributed $arguments"
