#!/usr/bin/env bash
# Checks and measures the CUDA backend on a machine with an NVIDIA GPU, beside llama.cpp where its source is given.
#
#   bench/cuda.sh OUT MOEFLUX [LLAMA_CPP.tar.xz [OPS_TEST]]
#
# OUT is a folder for logs, MOEFLUX the binary, OPS_TEST the test binary of the operations
# (`cargo test -p moeflux-compute --test ops --no-run`). llama.cpp is built in the background, without what llama-bench does not need.
set -uo pipefail
here=$(dirname "$(realpath "$0")")
out=$(realpath "$1") moeflux=$(realpath "$2") llama=${3:+$(realpath "$3")} ops=${4:+$(realpath "$4")}
work=$(mktemp -d)
say() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }

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
"$moeflux" synth qwen3-30b-a3b "$work/model.gguf" >"$out/synth.log" 2>&1 &
synth=$!
timeout 150 python3 "$here/compare_backends.py" "$moeflux" >"$out/backends.log" 2>&1
cut -c1-160 "$out/backends.log" | grep -A2 BAD | head -24; head -8 "$out/backends.log"; tail -1 "$out/backends.log"
if [ -n "$ops" ]; then
  say operations
  timeout 150 "$ops" --nocapture --test-threads 12 >"$out/ops.log" 2>&1
  grep -E "on CUDA|^test .*(ok|FAILED)|panicked|test result" -A1 "$out/ops.log" | grep -v "^--" | cut -c1-300 | tail -50
fi
wait "$synth"
tail -1 "$out/synth.log"
say first start
time "$moeflux" bench "$work/model.gguf" --backend cuda -p 64 -n 8 -r 1 2>&1 | tail -4
say decode and prefill
"$moeflux" bench "$work/model.gguf" --backend cuda --chunk 2048 -p 512,2048 -n 64 -d 0 -r 3 --profile 2>&1 | tee "$out/bench.log" | grep -v "^$" | head -60
say decode at depth 4096
"$moeflux" bench "$work/model.gguf" --backend cuda --chunk 2048 -p 0 -n 64 -d 4096 -r 3 --profile 2>&1 | tee "$out/depth.log" | tail -22

if [ -n "$llama" ]; then
  wait "$build"
  say llama.cpp
  bench="$work/llama/build/bin/llama-bench"
  "$bench" -m "$work/model.gguf" -p 512,2048 -n 128 -fa 1 -ub 2048 -r 3 2>&1 | tee "$out/llama.log" | grep -E "\||error"
  "$bench" -m "$work/model.gguf" -p 0 -n 64 -d 4096 -fa 1 -r 3 2>&1 | tee -a "$out/llama.log" | grep -E "\||error"
fi
say done
