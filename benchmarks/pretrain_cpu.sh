#!/usr/bin/env bash
# The pretraining comparison of docs/results.md, on a CPU: four variants, three paired seeds, one thread.
#
#     bash benchmarks/pretrain_cpu.sh FOLDER [STEPS]
#
# Fetches about 23 MB of English (benchmarks/pretrain_corpus.py), then trains. Started again with the same folder
# and steps, after any interruption, it goes on where it was. A step is 8 x 256 tokens: the default of 500 steps is
# 1.02 M tokens a run, 2442 steps are 5 M. One core trains about 14,000 tokens a second.
set -euo pipefail
work=${1:?give a folder}
steps=${2:-500}
here=$(cd "$(dirname "$0")" && pwd)
export OMP_NUM_THREADS=1

mkdir -p "$work"
[ -f "$work/corpus/SOURCES" ] || python "$here/pretrain_corpus.py" "$work/corpus"
resume=()
[ -f "$work/run-$steps/partial.json" ] && resume=(--resume)
exec nice -n 10 perpend train --text "$work/corpus" --data "$work/data" --vocab 1024 --valid 0.02 --size toy \
    --compare baseline,residual,value-full,value-exclude-self --seeds 3 \
    --steps "$steps" --warmup "$((steps / 20))" --batch 8 --lr 4e-3 \
    --log-every 10 --eval-every "$((steps / 10))" --eval-sequences 128 --save-every 50 \
    --snapshot-every "$((steps / 10))" --out "$work/run-$steps" "${resume[@]}"
