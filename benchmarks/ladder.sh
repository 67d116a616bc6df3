#!/usr/bin/env bash
# The ladder on the GPUs of this machine: the original's recipe, then each switch added in turn, SD2 base at 512 px with EMA
# and synthetic data, last on latents, into one record file, which is shown at the end.
#
#     benchmarks/ladder.sh results/ladder.jsonl
#
# A rung is measured for MEASURE_BATCHES (40) batches of BATCH images a GPU (128): on a GPU that makes 40 images/s that is
# two minutes, and less is too short, since clocks drop as the card warms. MICROBATCHES are tried on the fastest settings.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:?usage: benchmarks/ladder.sh RESULTS}
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
((gpus)) || { echo 'ladder.sh: this machine has no GPU' >&2; exit 1; }

rung() {
    composer -n "$gpus" benchmark.py "${data:---use_synth_data}" ${ema---use_ema} --batch_size $((${BATCH:-128} * gpus)) \
        --measure_batches "${MEASURE_BATCHES:-40}" --warmup_batches 5 --results "$results" "$@" ||
        echo "ladder.sh: failed: $*" >&2 # a rung that does not fit or build leaves the others to run
}

# Each rung keeps what the rung before it added.
original=(--precision amp_fp16 --encoder_precision fp32 --no-channels_last --no-fused_optimizer --no-compile)
rung "${original[@]}" --device_train_microbatch_size 4
rung "${original[@]}" --device_train_microbatch_size 4 --attention xformers
rung "${original[@]}" --device_train_microbatch_size 4 --fused_optimizer
rung --precision amp_bf16 --encoder_precision fp32 --no-channels_last --no-compile --device_train_microbatch_size 4
rung --encoder_precision bf16 --no-channels_last --no-compile --device_train_microbatch_size 4
rung --channels_last --no-compile --device_train_microbatch_size 4
rung --compile --device_train_microbatch_size 4
for microbatch in ${MICROBATCHES:-16 32 64 128}; do
    rung --compile --device_train_microbatch_size "$microbatch"
    data=--use_synth_latents rung --compile --device_train_microbatch_size "$microbatch"
done
data=--use_synth_latents ema='' rung --compile --device_train_microbatch_size 64 # the closest to MLPerf's, on its batch
python report.py "$results" --compare
