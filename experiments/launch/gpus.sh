#!/bin/bash
# Several GPUs on one machine.
#
#   bash experiments/launch/gpus.sh --config=configs/wmt14.py --workdir=runs/wmt14
#
# One process uses all GPUs: nothing to set up. Started again if it is killed.
# PROCESSES=8 makes it one process a GPU, which can feed them faster.
set -eu
exec python -m experiments.launch --processes="${PROCESSES:-1}" --retries="${RETRIES:-3}" -- \
  python -m experiments.train "$@"
