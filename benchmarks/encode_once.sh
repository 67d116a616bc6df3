#!/usr/bin/env bash
# What does encoding once give here? Convert, encode and train on the latents, and beside it with the encoders in the loop.
#
#     benchmarks/encode_once.sh SOURCE OUT [flags of the trainings; those of the model are for the encoding, too]
#     benchmarks/encode_once.sh photos /tmp/encode-once --image_size 512
#
# Without a GPU the tiny model stands in. Records go to OUT/results.jsonl; the report comes last.
set -euo pipefail
cd "$(dirname "$0")/.."
source_files=$1 out=$2
shift 2
if [ "$(python -c 'import torch; print(torch.cuda.device_count())')" -gt 0 ]; then
    launch=(composer) model=()
else
    launch=(python) model=(--model_name tiny --image_size 64)
fi
training=()
while (($#)); do
    case $1 in
        --model_name | --image_size | --seed) model+=("$1" "$2"); shift ;;
        --pretrained) model+=("$1") ;;
        *) training+=("$1") ;;
    esac
    shift
done
train=(--use_ema --results "$out/results.jsonl" "${model[@]}" "${training[@]}")
python convert.py "$source_files" "$out/images"
python encode.py --remote "$out/images" --out "$out/latents" --results "$out/results.jsonl" "${model[@]}"
"${launch[@]}" benchmark.py --remote "$out/images" "${train[@]}"
"${launch[@]}" benchmark.py --remote "$out/latents" "${train[@]}"
python report.py "$out/results.jsonl"
