#!/bin/sh
# Trains and evaluates the demo model on a machine with one GPU and leaves in OUT: tokenizer/, checkpoint/ (transformers,
# bf16), rounded/ (its weights as the shipped file rounds them), problems.jsonl, log.csv, facts.json and the accuracies
# accuracy.bf16.json and accuracy.rounded.json with answers.*.jsonl.
#
#   train_on_gpu.sh OUT SECONDS [START [train.py options]]
#
# SECONDS is for training, compilation included; making and evaluating take a few minutes more. START is a checkpoint
# folder or GGUF file to go on from; without it, or when it is "-", training begins from nothing with a fresh tokenizer.
# COUNT (default 300) is the number of held-out problems a task.
set -eu
out=$1
seconds=$2
start=${3:--}
[ $# -lt 3 ] && shift 2 || shift 3
here=$(cd "$(dirname "$0")" && pwd)
device=$(python3 -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')
deadline=$(($(date +%s) + seconds))
mkdir -p "$out"

case $start in
-) python3 "$here/generate.py" tokenizer --out "$out/tokenizer" ;;
*)
    [ -d "$start" ] || { python3 "$here/export.py" --gguf "$start" --out "$out/start" && start=$out/start; }
    mkdir -p "$out/tokenizer" && cp "$start"/tokenizer*.json "$start"/chat_template.jinja "$out/tokenizer"
    set -- --start "$start" "$@"
    ;;
esac
python3 "$here/generate.py" eval --count "${COUNT:-300}" --out "$out/problems.jsonl" &
problems=$!
python3 "$here/train.py" --out "$out" --tokenizer "$out/tokenizer" --deadline "$deadline" --minutes 1000 --device "$device" "$@"
wait $problems

judge() {
    python3 "$here/evaluate.py" --engine transformers --model "$out/$1" --problems "$out/problems.jsonl" --count "${COUNT:-300}" \
        --device "$device" --batch 512 --json "$out/accuracy.$2.json" --answers "$out/answers.$2.jsonl"
}
judge checkpoint bf16 &
bf16=$!
judge rounded rounded
wait $bf16
