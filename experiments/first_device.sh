#!/bin/bash
# Runs every measurement that needs an accelerator, the most valuable ones first.
#
#   experiments/first_device.sh                    # all pieces that are not done yet
#   experiments/first_device.sh attention table1   # only these two
#   experiments/first_device.sh --out=runs/device  # writes there, not to results/
#   TOY=1 experiments/first_device.sh              # tries them on a CPU, in runs/toy
#
# No piece begins after MINUTES (default 20; 0: no limit), and one that runs is stopped
# then, or after LIMIT seconds (default 570; 0: never). The next call resumes its sweep;
# tests and timings take minutes and start again. A finished piece leaves
# OUT/first_device/PIECE.log, a stopped or failed one PIECE.failed. The pieces after it
# run in any case. A table at the end tells which claims the results decide. The exit
# status is 0 once all are done.
#
# First install '.[test,gpu]' or '.[test,tpu]', and for PyTorch's attention a torch that
# matches the GPU's CUDA. DATA names a folder with multi30k/raw, jsb and scan; without
# it the corpora are downloaded. PARALLEL sets how many trainings share a GPU.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
toy=${TOY:-} out=results
[[ $toy ]] && out=runs/toy
case ${1:-} in
  --out=*) out=${1#--out=}; shift ;;
  -*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
minutes=${MINUTES:-20}
chosen=" $* " logs=$out/first_device names=() open=()
mkdir -p "$logs" || exit 2
trap 'kill "$!" 2>/dev/null; exit 130' INT TERM

export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/runs/compiled}
if [[ $toy ]]; then
  export JAX_PLATFORMS=cpu
  export XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
fi
{ read -r platform device; read -r environment; } < <(python - <<'END'
import json, re, jax
from experiments.training.environment import environment
kind = jax.devices()[0].device_kind.lower()
print(jax.default_backend(), re.sub("[^a-z0-9]+", "-", kind).strip("-"))
print(json.dumps(environment("torch")))
END
)
if [[ ${platform:-cpu} == cpu && ! $toy ]]; then
  echo "JAX finds no accelerator; TOY=1 tries the pieces on a CPU" >&2
  exit 2
fi

piece() {  # NAME COMMAND...: runs the command unless it is done or not asked for
  local log=$logs/$1 name=$1 status limit left
  shift
  names+=("$name")
  [[ $chosen == *[![:space:]]* && $chosen != *" $name "* ]] && return
  [[ -e $log.log ]] && echo "$name: done before" && return
  limit=${LIMIT:-570}
  if (( minutes )); then
    left=$((60 * minutes - SECONDS))
    (( left <= 0 )) && open+=("$name") && return
    (( limit == 0 || limit > left )) && limit=$left
  fi
  echo "$name: $(date +%T)"
  printf '%s\n' "$environment" "$*" >"$log.failed"
  timeout --kill-after=20 "$limit" "$@" >>"$log.failed" 2>&1 </dev/null &
  wait "$!" && mv "$log.failed" "$log.log" && return
  status=$?
  open+=("$name")
  [[ $status == 124 || $status == 137 ]] && echo "$name: stopped, call again" && return
  echo "$name: exit status $status, see $log.failed"
  tail -n 1 "$log.failed"
}

tests() {  # NAME EXPRESSION
  piece "$1" python -m pytest -o addopts= -W default -p no:cacheprovider -p no:benchmark \
    --no-header -m device -rA -n "$workers" -k "$2" tests/attention/test_on_device.py
}

benchmark() {  # NAME COMMAND FLAG...: without the cache, to report memory
  piece "$1" env -u JAX_COMPILATION_CACHE_DIR \
    python -m experiments.benchmark "$2" --out="$out" "${@:3}"
}

sweep() {  # NAME CONFIG FLAG...: with TOY only the first run
  local words=(python -m experiments.sweep --config="configs/$2" --results="$out" "${@:3}")
  if [[ $toy ]]; then
    words+=(--dry_run --seeds=1 --out="$out/sweeps" "${small[@]}" --config.training.num_steps=2)
    words=(bash -o pipefail -c '"$@" | sed -n 1p | bash' - "${words[@]}")
  fi
  piece "$1" "${words[@]}"
}

# One process at a time may use a TPU.
workers=8 parallel=${PARALLEL:-4} few=${PARALLEL:-2}
[[ $platform == tpu ]] && workers=1 parallel=1 few=1
for folder in "${DATA:-}" shared/data ../shared/data; do
  [[ -d $folder/multi30k/raw ]] && break
done
captions=() chorales=() scan=()
[[ -d $folder/multi30k/raw ]] && captions=(--config.data.multi30k.path="$folder/multi30k/raw")
[[ -d $folder/jsb ]] && chorales=(--config.data.chorales.path="$folder/jsb")
[[ -d $folder/scan ]] && scan=(--config.data.scan.path="$folder/scan")
kernels="mosaic_gpu or pallas_gpu" others="chunked or projected" cases=""
lengths=(--lengths=1024,2048,4096,16384 --tokens=16384 --repetitions=20)
schemes=(--lengths=1024,4096 --tokens=16384 --repetitions=10) step=(--length=32)
if [[ $toy ]]; then
  workers=1 others="projected and left" cases=" and left"
  small=(--config.model.width=16 --config.model.num_layers=1 --config.model.num_heads=2)
  lengths=(--lengths=16,32 --tokens=32 --heads=2 --width=16 --max_distance=2 --repetitions=1)
  schemes=("${lengths[@]}")
  step=(--length=4 "${small[@]}" --config.vocabulary.size=50)
  step+=(--repetitions=6 --config.batches.tokens=256)
  for i in {1..40}; do printf 'dog %d sees me\tHund %d sieht mich\n' "$i" "$i"; done >"$out/toy.tsv"
  captions=(--config.data.source=pairs --config.vocabulary.size=300 --config.batches.tokens=64)
  captions+=(--config.batches.num_shapes=1 --config.data.pairs.{train,valid,test}="$out/toy.tsv")
  captions+=(--config.decoding.{extra_length,beam_size,average_checkpoints}=1)
  scan=("${captions[@]}")
  chorales+=(--config.batches.num_shapes=1 --config.model.max_distance=2)
fi

tests parity_bfloat16 "($kernels) and bfloat16$cases"
kinds=(--implementations=mosaic_gpu,pallas_gpu,chunked --passes=backward)
benchmark attention attention "${lengths[@]}" "${kinds[@]}" --peers=cudnn,torch_sdpa
for dtype in bfloat16 float32; do
  kinds=(--implementations=none --schemes=all --passes=backward --dtype=$dtype)
  kinds+=(--peers=dense_bias,cudnn,torch_sdpa --name="$device-schemes-$dtype")
  benchmark schemes_$dtype attention "${schemes[@]}" "${kinds[@]}"
done
benchmark step_base step --config=configs/wmt14.py:base,ende,relative "${step[@]}"
tests parity_float32 "($kernels) and float32$cases"
tests parity_without_kernels "$others"
benchmark step_big step --config=configs/wmt14.py:big,ende,relative "${step[@]}"
for table in table1 table2 table3 sharing beyond; do
  sweep $table $table.py:published --parallel="$parallel" "${captions[@]}"
done
sweep lengths lengths.py:scan --parallel="$parallel" "${scan[@]}"
sweep positions_multi30k positions.py:multi30k --parallel="$parallel" "${captions[@]}"
sweep positions_chorales positions.py:chorales --parallel="$parallel" "${chorales[@]}"
sweep music music.py:published --parallel="$few" "${chorales[@]}"

python -m experiments.benchmark claims --out="$out" --device="$device"
for name in "$@"; do
  [[ " ${names[*]} " == *" $name "* ]] || open+=("$name")
done
compgen -G "$out/runs/*.jsonl*" >/dev/null && python -m experiments.report --results="$out"
if [[ ${#open[@]} != 0 ]]; then
  echo "not done: ${open[*]}; the pieces are ${names[*]}"
  exit 1
fi
