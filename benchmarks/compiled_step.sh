#!/bin/sh
# Measure where the compiled step spends its time on one GPU, and what single changes give. 15 minutes on an H100 or H200.
#
#     sh benchmarks/compiled_step.sh results/compiled-step
#
# The records are appended to FOLDER/records.jsonl, and FOLDER/*.txt has the table of kernels of each profiled run. All
# runs share one folder of compiled code, so a run compiles only what is new in it. A run that fails does not stop the
# others. More flags for all runs follow FOLDER.
set -u
folder=$1
shift
mkdir -p "$folder"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$folder/compiled}"

run() {
    name=$1
    shift
    echo "== $name: $*"
    python benchmark.py @recipes/fastest.txt --use_ema --batch_size 100 --device_train_microbatch_size 50 \
        --results "$folder/records.jsonl" "$@" || echo "failed: $name"
    for trace in "$folder/$name"/*.json; do
        [ ! -e "$trace" ] || python -m benchmarks.kernels "$trace" >"$folder/$name.txt"
    done
}

# Where the time goes, with and without the VAE
run images --use_synth_data --compile_blocks "$@"
run images-profile --use_synth_data --compile_blocks --profile "$folder/images-profile" "$@"
run latents --use_synth_latents --compile_blocks "$@"
run latents-profile --use_synth_latents --compile_blocks --profile "$folder/latents-profile" "$@"

# One change each
run cudnn --use_synth_data --compile_blocks --attention cudnn "$@"
run no-cudnn-benchmark --use_synth_data --compile_blocks --no-cudnn_benchmark "$@"
run whole --use_synth_data --no-compile_blocks "$@"
run autotune --use_synth_data --compile max-autotune-no-cudagraphs "$@"
run graph --use_synth_data --compile reduce-overhead --batch_size 50 "$@"
