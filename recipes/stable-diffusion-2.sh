#!/bin/sh
# Stable Diffusion 2 base from scratch, as its makers trained it: from images with captions to a model with its scores.
#
#   MODEL=FOLDER SOURCE=photos sh recipes/stable-diffusion-2.sh       # all of it
#   sh recipes/stable-diffusion-2.sh plan                             # what it would take and cost, without a GPU
#
# Start it where benchmark.py lies. When something stops it, start it again with the same variables: each command goes on
# where it was, and those that are through say so. phase-1.txt and phase-2.txt have the flags of the two phases, and say
# where their numbers come from. To try all of it on a CPU, in a few minutes:
#
#   MODEL=tiny SOURCE=photos LAUNCH=python SIZE_1=32 SIZE_2=64 STEPS_1=20 STEPS_2=20 BATCH_SIZE=4 HELD_OUT=0.3 \
#       PHASE_FLAGS='--lr_warmup 2ba --ema_half_life 5ba' SCORES='--samples 4' \
#       sh recipes/stable-diffusion-2.sh
set -eu
case "${1:-}" in
    '' | plan) ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

# What is there, and where what is made goes.
: "${SOURCE:=photos}"             # images with captions, as convert.py reads them
: "${SOURCE_2:=}"                 # those of phase 2, such as all of at least 512 pixels; SOURCE without it
: "${EVAL:=}"                     # those for the scores; needed with SOURCE_2, and without it held out from SOURCE
: "${WORK:=sd2-training}"         # folder or object store for shards and checkpoints
: "${OUT:=sd2-trained}"           # new folder of this machine for the pipeline; its pictures go to OUT/pictures
: "${RESULTS:=results.jsonl}"     # file for the records

# How it is trained.
: "${LATENTS:=}"                  # 1: encode the images once for each phase, and train on the latents
: "${SIZE_1:=256}" "${STEPS_1:=550000}"    # of phase 1: pixels, and batches
: "${SIZE_2:=512}" "${STEPS_2:=850000}"    # of phase 2
: "${BATCH_SIZE:=2048}"
: "${PHASE_FLAGS:=}"              # more flags of benchmark.py, for both phases
: "${ENCODE_FLAGS:=}"             # more flags of encode.py; a plan takes --compile for it where PHASE_FLAGS has it
: "${LAUNCH:=composer}"           # what starts a program on all GPUs of this machine

# How it is scored.
: "${HELD_OUT:=0.01}"             # without EVAL: share of the images of SOURCE that are kept for it
: "${SCORES:=--inception inception.pth --clip clip}"    # flags of evaluate.py; docs/evaluating.md says how to get these

# Which GPUs are planned for.
: "${GPUS:=8}"                   # how many, such as 8 or '8 16 32'
: "${GPU:=}"                      # which, such as 'H100-80GB NVIDIA-H200'; all that are known without it
: "${PRICES:=2}"                  # dollars of a GPU-hour, such as '2 H200=3.2' or @recipes/prices-spot.txt
: "${PLAN:=}"                     # file that keeps the forecasts, one line of JSON each; none without it
: "${IMAGES_1:=790000000}" "${IMAGES_2:=300000000}"    # with LATENTS: how many are encoded for each phase

phase_1="@recipes/phase-1.txt --image_size $SIZE_1 --max_duration ${STEPS_1}ba --batch_size $BATCH_SIZE"
phase_2="@recipes/phase-2.txt --image_size $SIZE_2 --max_duration ${STEPS_2}ba --batch_size $BATCH_SIZE"

if [ "${1:-}" = plan ]; then
    # A mistake in PRICES is said before minutes of work: this prints what comes with the program by them.
    case $PRICES in
        @*) prices=$PRICES ;;
        *) prices="--dollars_per_gpu_hour $PRICES" ;;
    esac
    python report.py published.csv --phase 1@512 $prices > /dev/null

    forecasts=$PLAN
    if [ -z "$PLAN" ]; then
        forecasts=$(mktemp)
        trap 'rm -f "$forecasts"' EXIT
    fi

    # What each phase needs and could reach. What is printed here says more; the plan has the costs, and no GPU whose
    # speed is not known.
    data=--use_synth_data
    if [ -n "$LATENTS" ]; then
        data=--use_synth_latents
    fi
    set -- --dry_run $GPUS ${GPU:+--gpu $GPU} ${MODEL:+--model_name "$MODEL"} --no-pretrained --results "$forecasts"
    echo "1 of 2: phase 1, at $SIZE_1 pixels (one to three minutes for each phase)" >&2
    answer=$(python benchmark.py $phase_1 $data $PHASE_FLAGS "$@")
    echo "$answer" | sed -n 's|^\(No speed of [^:]*\).*|\1: docs/forecast.md says why|p' >&2
    echo "2 of 2: phase 2, at $SIZE_2 pixels" >&2
    python benchmark.py $phase_2 $data $PHASE_FLAGS "$@" > /dev/null

    # The plan. How many images a phase trains on is in its forecast.
    set -- --phase "$SIZE_1" --phase "$SIZE_2"
    if [ -n "$LATENTS" ]; then
        set -- "$@" --encode "$IMAGES_1@$SIZE_1" --encode "$IMAGES_2@$SIZE_2"
    fi
    python report.py "$forecasts" "$@" $prices
    exit
fi

: "${MODEL:?is empty; give MODEL=FOLDER, with the weights of the VAE and the text encoder (docs/training.md)}"

# --held_out chooses an image by its bytes. A picture has other bytes at another size, so phase 2 would train on pictures
# that phase 1 holds out. With SOURCE_2 the scores are therefore on pictures that neither phase has at any size. Only you
# can make sure of that: set them aside before you make the two sizes.
if [ -n "$SOURCE_2" ]; then
    : "${EVAL:?is empty; with SOURCE_2 give EVAL=FOLDER, pictures with captions that neither SOURCE has at any size}"
fi

# What the last command needs is said before days of work: the networks now, and below how many samples there are.
python evaluate.py "$OUT" "$WORK" --out "$OUT/pictures" $SCORES --check_only networks

# Images with captions become shards, and some are for the scores alone.
data_1=$WORK/images
data_2=$WORK/images
if [ -n "$EVAL" ]; then
    python convert.py "$SOURCE" "$data_1"
    scored=$WORK/images-eval
    python convert.py "$EVAL" "$scored"
else
    python convert.py "$SOURCE" "$data_1" --held_out "$HELD_OUT"
    scored=$WORK/images-held-out
fi
python evaluate.py "$OUT" "$scored" --out "$OUT/pictures" $SCORES --check_only data
if [ -n "$SOURCE_2" ]; then
    data_2=$WORK/images-2
    python convert.py "$SOURCE_2" "$data_2"
fi

# Where it is asked for, the VAE encodes them once.
if [ -n "$LATENTS" ]; then
    set -- --model_name "$MODEL" --pretrained --results "$RESULTS"
    python encode.py --remote "$data_1" --out "$WORK/latents-$SIZE_1" --image_size "$SIZE_1" "$@" $ENCODE_FLAGS
    python encode.py --remote "$data_2" --out "$WORK/latents-$SIZE_2" --image_size "$SIZE_2" "$@" $ENCODE_FLAGS
    data_1=$WORK/latents-$SIZE_1
    data_2=$WORK/latents-$SIZE_2
fi

# Phase 1, from random weights. Phase 2, from the weights of phase 1.
$LAUNCH benchmark.py $phase_1 --model_name "$MODEL" --remote "$data_1" --save_folder "$WORK/phase-1" \
    --results "$RESULTS" $PHASE_FLAGS
$LAUNCH benchmark.py $phase_2 --model_name "$MODEL" --remote "$data_2" --save_folder "$WORK/phase-2" \
    --load_weights "$WORK/phase-1" --results "$RESULTS" $PHASE_FLAGS

# A pipeline of the averaged weights. Where OUT has them already, export.py says so.
python export.py "$WORK/phase-2" "$OUT"

# Pictures of captions that no phase was trained on, and their scores.
$LAUNCH evaluate.py "$OUT" "$scored" --out "$OUT/pictures" --results "$RESULTS" $SCORES
