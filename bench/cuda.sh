#!/usr/bin/env bash
# Checks and measures the CUDA backend on a machine with an NVIDIA GPU, beside llama.cpp where its source is given.
#
#   bench/cuda.sh OUT MOEFLUX [LLAMA_CPP.tar.xz [OPS_TEST]]
#
# OUT is a folder for logs, MOEFLUX the binary, OPS_TEST the test binary of the operations
# (`cargo test -p moeflux-compute --test ops --no-run`). llama.cpp is built while the checks run, without what
# llama-bench does not need; measurements begin when that is done.
set -uo pipefail
here=$(dirname "$(realpath "$0")")
out=$(realpath "$1") moeflux=$(realpath "$2") llama=${3:+$(realpath "$3")} ops=${4:+$(realpath "$4")}
work=$(mktemp -d)
PATH=$PATH:/usr/local/cuda/bin
model=$work/model.gguf
fixtures=$here/../crates/engine/tests/fixtures
budget=9GiB
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

if [ -n "$llama" ]; then
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
[ -z "$llama" ] || wait "$build"
say decode and prefill
"$moeflux" bench "$model" --backend cuda --chunk 2048 -p 512,2048 -n 64 -d 0 -r 3 --profile 2>&1 | tee "$out/bench.log" | grep -v "^$" | head -60
say decode at depth 4096
"$moeflux" bench "$model" --backend cuda --chunk 2048 -p 0 -n 64 -d 4096 -r 3 --profile 2>&1 | tee "$out/depth.log" | grep -v "^$" | head -18
if [ -n "$llama" ]; then
  say llama.cpp
  peer="$work/llama/build/bin/llama-bench"
  "$peer" -m "$model" -p 512,2048 -n 128 -fa 1 -ub 2048 -r 3 2>&1 | tee "$out/llama.log" | grep -E "\||error"
  "$peer" -m "$model" -p 0 -n 64 -d 4096 -fa 1 -r 3 2>&1 | tee -a "$out/llama.log" | grep -E "\||error"
fi
say "$budget of the GPU's memory"
watched "$moeflux" bench "$model" --backend cuda --device-memory $budget -p 512 -n 64 -d 0 -r 2 --profile 2>&1 | tee "$out/budget.log" | grep -E "\||budget|most" | head -40
if [ -n "$llama" ]; then
  for layers in 24 26; do
    watched "$peer" -m "$model" -p 512 -n 64 -fa 1 -t 16 -r 2 -ncmoe $layers 2>&1 | tee -a "$out/llama.log" | grep -E "\||error|most"
  done
fi
say done
