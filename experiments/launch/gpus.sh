#!/bin/bash
# Trains on several GPUs of one machine.
#
#   bash experiments/launch/gpus.sh --config=configs/wmt14.py --workdir=runs/wmt14
#
# One process uses all GPUs; it is restarted if it is killed. PROCESSES=8 starts one
# process for each of eight GPUs, which may load data faster.
set -eu
exec python -m experiments.launch --processes="${PROCESSES:-1}" --retries="${RETRIES:-3}" -- \
  python -m experiments.train "$@"
