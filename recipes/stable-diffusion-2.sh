#!/bin/sh
# Train Stable Diffusion 2 base from scratch, as its authors did: from images with captions to a trained model with scores.
#
#   MODEL=FOLDER SOURCE=photos sh recipes/stable-diffusion-2.sh       # the whole training
#   python plan.py                                                    # forecast its time and cost, without a GPU
#
# By default it trains as plan.py plans it: on latents, with fastest.txt.
#
# Run it in the folder of benchmark.py. If it stops, run it again with the same variables: finished steps are skipped,
# and the others continue. phase-1.txt and phase-2.txt hold the flags of the two phases and the sources of their numbers.
# To try all of it on a CPU in a few minutes:
#
#   MODEL=tiny SOURCE=photos LAUNCH=python SIZE_1=32 SIZE_2=64 STEPS_1=20 STEPS_2=20 BATCH_SIZE=4 HELD_OUT=0.3 \
#       PHASE_FLAGS='--lr_warmup 2ba --ema_half_life 5ba' ENCODE_FLAGS= SCORES='--samples 4' \
#       sh recipes/stable-diffusion-2.sh
set -eu
if [ -n "${1:-}" ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
fi

# Input and output.
: "${SOURCE:=photos}"             # images with captions, in any format that convert.py reads
: "${SOURCE_2:=}"                 # images for phase 2, such as those of at least 512 pixels (default: SOURCE)
: "${EVAL:=}"                     # images for the scores (default: held out from SOURCE; needed with SOURCE_2)
: "${WORK:=sd2-training}"         # folder or object store for shards and checkpoints
: "${OUT:=sd2-trained}"           # new folder on this machine for the pipeline; generated images go to OUT/pictures
: "${RESULTS:=results.jsonl}"     # file for the records

# Training.
: "${LATENTS=1}"                  # 1: encode the images once for each phase, and train on the latents; empty: on images
: "${SIZE_1:=256}" "${STEPS_1:=550000}"    # image size in pixels and number of steps of phase 1
: "${SIZE_2:=512}" "${STEPS_2:=850000}"    # the same for phase 2
: "${BATCH_SIZE:=2048}"
: "${PHASE_FLAGS=@recipes/fastest.txt}"    # more flags for benchmark.py, used in both phases
: "${ENCODE_FLAGS=--compile}"     # more flags for encode.py
: "${LAUNCH:=composer}"           # command that starts a program on all GPUs of this machine

# Scores.
: "${HELD_OUT:=0.01}"             # without EVAL: fraction of the images in SOURCE to hold out for the scores
: "${SCORES:=--inception inception.pth --clip clip}"    # flags for evaluate.py; docs/evaluating.md says how to get the files

phase_1="@recipes/phase-1.txt --image_size $SIZE_1 --max_duration ${STEPS_1}ba --batch_size $BATCH_SIZE"
phase_2="@recipes/phase-2.txt --image_size $SIZE_2 --max_duration ${STEPS_2}ba --batch_size $BATCH_SIZE"

: "${MODEL:?is empty; give MODEL=FOLDER, with the weights of the VAE and the text encoder (docs/training.md)}"

# --held_out chooses images by their bytes. The same picture has different bytes at another size, so phase 2 would train
# on pictures that phase 1 holds out. With SOURCE_2 the scores therefore need pictures that neither phase has at any
# size. Only you can make sure of that: set them aside before you create the two sizes.
if [ -n "$SOURCE_2" ]; then
    : "${EVAL:?is empty; with SOURCE_2 give EVAL=FOLDER, pictures with captions that neither SOURCE has at any size}"
fi

# Check what the last command needs before days of training: the networks here, and the number of samples below.
python evaluate.py "$OUT" "$WORK" --out "$OUT/pictures" $SCORES --check_only networks

# Convert images with captions to shards. Some images are only for the scores.
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

# With LATENTS, encode the images once for each phase.
if [ -n "$LATENTS" ]; then
    set -- --model_name "$MODEL" --pretrained --results "$RESULTS"
    python encode.py --remote "$data_1" --out "$WORK/latents-$SIZE_1" --image_size "$SIZE_1" "$@" $ENCODE_FLAGS
    python encode.py --remote "$data_2" --out "$WORK/latents-$SIZE_2" --image_size "$SIZE_2" "$@" $ENCODE_FLAGS
    data_1=$WORK/latents-$SIZE_1
    data_2=$WORK/latents-$SIZE_2
fi

# Train phase 1 from random weights, then phase 2 from the weights of phase 1.
$LAUNCH benchmark.py $phase_1 --model_name "$MODEL" --remote "$data_1" --save_folder "$WORK/phase-1" \
    --results "$RESULTS" $PHASE_FLAGS
$LAUNCH benchmark.py $phase_2 --model_name "$MODEL" --remote "$data_2" --save_folder "$WORK/phase-2" \
    --load_weights "$WORK/phase-1" --results "$RESULTS" $PHASE_FLAGS

# Export a pipeline with the EMA weights. If OUT already holds it, export.py says so.
python export.py "$WORK/phase-2" "$OUT"

# Generate images from captions that neither phase was trained on, and score them.
$LAUNCH evaluate.py "$OUT" "$scored" --out "$OUT/pictures" --results "$RESULTS" $SCORES
