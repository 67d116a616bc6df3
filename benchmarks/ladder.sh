#!/usr/bin/env bash
# The ladder on the GPUs of this machine: the original's recipe, today's, each switch alone on top of it, and the best
# together at several microbatches. SD2 base at 512 px with EMA and synthetic data, all into one record file, which is
# shown and drawn at the end.
#
#     benchmarks/ladder.sh results/ladder.jsonl          # all rungs
#     benchmarks/ladder.sh results/ladder.jsonl 60       # what fits into 60 minutes; the most telling rungs come first
#
# A rung is measured for MEASURE_BATCHES (40) batches of BATCH images a GPU (128): on a GPU that makes 40 images/s that is
# two minutes, and less is too short, since clocks drop as the card warms. MICROBATCHES are tried on the fastest settings.
# What is expected of each rung was written down before any was measured.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:?usage: benchmarks/ladder.sh RESULTS [MINUTES]}
seconds_for_report=60
mkdir -p "$(dirname "$results")"
end=$((${2:-1000000} * 60 - seconds_for_report)) # by bash's own clock, SECONDS since the start of this script
longest=120                                      # seconds that the longest rung took, at first a guess
gpus=${GPUS:-$(python -c 'import torch; print(torch.cuda.device_count())')}
((gpus)) || { echo 'ladder.sh: this machine has no GPU' >&2; exit 1; }
launcher=(composer)
command -v composer >/dev/null || launcher=(python -m composer.cli.launcher)

# rung EXPECTATION FLAGS...: one run, unless as long a one as the longest so far would not end in time.
rung() {
    local expectation=$1 start=$SECONDS
    shift
    if ((SECONDS + longest > end)); then
        echo "ladder.sh: no time left for: $*" >&2
        return
    fi
    echo "ladder.sh: $*; expected: $expectation" >&2
    # a rung that does not fit or build leaves the others to run
    timeout --kill-after=30 $((end - SECONDS)) "${launcher[@]}" -n "$gpus" benchmark.py \
        "${data:---use_synth_data}" ${ema---use_ema} --batch_size $((${BATCH:-128} * gpus)) \
        --measure_batches "${MEASURE_BATCHES:-40}" --warmup_batches 5 --results "$results" "$@" ||
        echo "ladder.sh: failed: $*" >&2
    local took=$((SECONDS - start))
    ((took <= longest)) || longest=$took
}

micro=--device_train_microbatch_size
original=(--precision amp_fp16 --encoder_precision fp32 --no-channels_last --no-fused_optimizer --no-compile)
plain=(--precision amp_bf16 --encoder_precision bf16 --channels_last --fused_optimizer --no-compile)
# without the compiler, and with it: what it fuses needs no norms of its own, and its graphs cast for themselves
eager=("${plain[@]}" --half_precision_norms --channels_last_norms --cudnn_benchmark --attention cudnn --cast_weights_once)
best=("${plain[@]}" --compile --half_precision_norms --cudnn_benchmark --attention cudnn)

# The most telling: where it started, where it stands, and what all switches together give.
rung 'the recipe of the published 16 images/s on an A100' "${original[@]}" $micro 4
rung 'the defaults; every rung below is compared with this one' "${plain[@]}" $micro 16
rung '15 to 30 %: NVIDIA saw 6 % of inductor after 23 % of channels_last' "${plain[@]}" --compile $micro 16
rung 'most of what the compiler gives, without its minutes' "${eager[@]}" $micro 16
rung '5 % over --compile' "${best[@]}" $micro 16
rung '10 to 25 % over microbatch 16' "${best[@]}" $micro 64
data=--use_synth_latents rung '1.3 to 1.5 times as fast, by arithmetic without the VAE' "${best[@]}" $micro 64

# Each switch alone, on the defaults.
rung '5 to 15 %, and a quarter less memory for activations' "${plain[@]}" --half_precision_norms $micro 16
rung '5 to 15 %: no change of layout at norms' "${plain[@]}" --channels_last_norms $micro 16
rung '2 to 5 %' "${plain[@]}" --attention cudnn $micro 16
rung 'the same as the defaults on an A100, where flash comes first' "${plain[@]}" --attention flash $micro 16
rung '2 to 5 %, where FlashAttention 3 is built' "${plain[@]}" --attention xformers $micro 16
rung '1 to 5 %' "${plain[@]}" --cudnn_benchmark $micro 16
rung 'the speed of --compile within 5 %, with a start several times as short' \
    "${plain[@]}" --compile --compile_blocks $micro 16
rung '0 to 5 % over --compile' "${plain[@]}" --compile max-autotune-no-cudagraphs $micro 16
rung '0 to 2 % over --compile at this microbatch; it may not run' \
    "${plain[@]}" --compile reduce-overhead $micro "${BATCH:-128}"
rung 'the base of the next rung' "${plain[@]}" $micro 4
rung '1 to 4 %: 5 GB less to read and write for each 4 images' "${plain[@]}" --cast_weights_once $micro 4
if ((gpus > 1)); then
    rung '0 to 1 % within a node; 2 to 4 % at 128 GPUs' "${plain[@]}" --allreduce_precision bf16 $micro 16
fi

# What the defaults changed, one after the other, from the recipe of the original.
rung 'within 5 % of the first rung: both use flash attention' "${original[@]}" --attention xformers $micro 4
rung '0 to 1 % over the first rung: an optimizer step is short beside 32 microbatches' \
    "${original[@]}" --fused_optimizer $micro 4
rung 'the speed of the first rung' --precision amp_bf16 --encoder_precision fp32 --no-channels_last --no-compile $micro 4
rung '3 to 8 %: the weights of the encoders are never cast, and their norms are in half precision' \
    --precision amp_bf16 --encoder_precision bf16 --no-channels_last --no-compile $micro 4

# The best together, at several microbatches.
for microbatch in ${MICROBATCHES:-32 128}; do
    rung 'more with each, until the GPU is full' "${best[@]}" $micro "$microbatch"
    data=--use_synth_latents rung 'more with each, until the GPU is full' "${best[@]}" $micro "$microbatch"
done
data=--use_synth_latents ema='' rung "the closest to MLPerf's 149.6 images/s on an H200" "${best[@]}" $micro 64
python report.py "$results" --compare --figure "${results%.*}.png"
