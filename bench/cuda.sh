#!/usr/bin/env bash
# Checks and measures the CUDA backend on a machine with an NVIDIA GPU, beside llama.cpp where its source is given.
#
#   bench/cuda.sh OUT MOEFLUX [LLAMA_CPP.tar.xz|LLAMA_BENCH [OPS_TEST]]
#
# OUT is a folder for logs, MOEFLUX the binary, OPS_TEST the test binary of the operations
# (`cargo test -p moeflux-compute --test ops --no-run`). llama.cpp is built while the checks run, without what
# llama-bench does not need, unless its binary is given; measurements begin when that is done.
set -uo pipefail
here=$(dirname "$(realpath "$0")")
out=$(realpath "$1") moeflux=$(realpath "$2") llama=${3:+$(realpath "$3")} ops=${4:+$(realpath "$4")}
work=$(mktemp -d)
PATH=$PATH:/usr/local/cuda/bin
model=$work/model.gguf
fixtures=$here/../crates/engine/tests/fixtures
budget=9GiB
# Makes as much of the GPU's memory be in use as llama.cpp has with the experts of 24 of 48 layers.
equal=10.75GiB
say() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }
# Runs a command and says how much memory of the GPU was in use at most.
watched() {
  nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -l 1 >"$work/used" 2>/dev/null &
  local watcher=$!
  "$@"
  kill "$watcher"
  echo "most memory of the GPU in use: $(sort -n "$work/used" | tail -1) MiB"
}

# Accesses or races of three models' kernels.
sanitize() {
  local tool=$1 run name mode chunk
  for run in "qwen3_moe_q4_k_m int8 48" "qwen3_moe_q4_k_m int8 4" "gpt_oss_mxfp4 f32 4"; do
    read -r name mode chunk <<<"$run"
    timeout 70 compute-sanitizer --tool "$tool" "$moeflux" logits "$fixtures/gguf/$name/model.gguf" --backend cuda \
      --tokens "$(seq -s, 1 40)" --out "$work/logits.$tool" --activations "$mode" --chunk "$chunk" >"$work/$tool" 2>&1
    echo "$tool, $run: exit $?, $(tail -1 "$work/$tool")"
    cat "$work/$tool" >>"$out/sanitizer.log"
  done
}

peer="$work/llama/build/bin/llama-bench"
if [ -x "$llama" ]; then
  peer=$llama
elif [ -n "$llama" ]; then
  mkdir "$work/llama"
  tar -C "$work/llama" --strip-components 1 -xf "$llama"
  (
    cmake -S "$work/llama" -B "$work/llama/build" -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90 -DCMAKE_BUILD_TYPE=Release \
      -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF \
      -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DBUILD_SHARED_LIBS=OFF &&
      nice cmake --build "$work/llama/build" --target llama-bench -j "$(nproc)"
  ) >"$out/llama-build.log" 2>&1 &
  build=$!
fi

say devices
"$moeflux" devices
say a synthetic model, and backends beside each other
"$moeflux" synth qwen3-30b-a3b "$model" >"$out/synth.log" 2>&1 &
synth=$!
sanitizers=()
for tool in memcheck racecheck; do
  sanitize $tool >"$work/$tool.txt" &
  sanitizers+=($!)
done
if [ -n "$ops" ]; then
  timeout 150 "$ops" --nocapture --test-threads 8 >"$out/ops.log" 2>&1 &
  operations=$!
fi
timeout 200 python3 "$here/compare_backends.py" "$moeflux" >"$out/backends.log" 2>&1
cut -c1-160 "$out/backends.log" | grep -A2 BAD | head -24
tail -12 "$out/backends.log"
if [ -n "$ops" ]; then
  say operations
  wait "$operations"
  grep -E "^test .*FAILED|panicked|test result" -A1 "$out/ops.log" | grep -v "^--" | cut -c1-300 | tail -40
fi
wait "$synth"
tail -1 "$out/synth.log"
say first start
time "$moeflux" bench "$model" --backend cuda -p 64 -n 8 -r 1 2>&1 | tail -4
say "bits of streaming with $budget"
for memory in 100GiB $budget; do
  "$moeflux" logits "$model" --backend cuda --device-memory $memory --activations int8 --chunk 20 \
    --tokens "$(seq -s, 1000 7 1300 | cut -d, -f1-43)" --out "$work/$memory" || echo "BAD $memory"
done
cmp "$work/100GiB" "$work/$budget" && echo "logits are the same bits"

say accesses and races
wait "${sanitizers[@]}"
cat "$work"/*check.txt
[ -z "${build:-}" ] || wait "$build"
ours() { "$moeflux" bench "$model" --backend cuda "$@" 2>&1 | tee -a "$out/bench.log" | grep -E "pp|tg|a token|most"; }
theirs() { "$peer" -m "$model" -fa 1 "$@" 2>&1 | tee -a "$out/llama.log" | grep -E "pp|tg|error|most"; }
for turn in 1 2; do
  say "turn $turn, all in the GPU's memory"
  ours --chunk 2048 -p 512,2048 -n 128 -d 0 -r 3
  [ -z "$llama" ] || theirs -r 3 -p 512,2048 -n 128 -ub 2048
  ours --chunk 2048 -p 0 -n 64 -d 4096 -r 3
  [ -z "$llama" ] || theirs -r 3 -p 0 -n 64 -d 4096
  say "turn $turn, experts elsewhere"
  watched ours --device-memory $budget -p 512 -n 64 -d 0 -r 2
  [ -z "$llama" ] || watched theirs -r 2 -p 512 -n 64 -t 16 -ncmoe 26
  watched ours --device-memory $equal -p 512 -n 64 -d 0 -r 2
  [ -z "$llama" ] || watched theirs -r 2 -p 512 -n 64 -t 16 -ub 2048 -ncmoe 24
done
say where the time goes
"$moeflux" bench "$model" --backend cuda -p 0 -n 64 -d 0,4096 -r 1 --profile 2>&1 | tee "$out/profile.log" | grep -v "^$" | head -50
"$moeflux" bench "$model" --backend cuda --device-memory $budget -p 0 -n 64 -d 0 -r 1 --profile 2>&1 | tee -a "$out/profile.log" | grep -v "^$" | head -30
say logits of every position, and budgets that are too small
"$moeflux" logits "$model" --backend cuda --device-memory $budget --activations int8 --chunk 700 \
  --tokens "$(seq -s, 1 700)" --out "$work/every" && echo "700 positions: $(stat -c %s "$work/every") bytes"
for memory in 256MiB 1GiB; do "$moeflux" bench "$model" --backend cuda --device-memory $memory -p 8 -n 1 -r 1 2>&1 | tail -1; done
say done
