#!/usr/bin/env bash
# Checks and measures the CUDA backend on a machine with an NVIDIA GPU, beside llama.cpp where that is given.
#
#   bench/cuda.sh [-p PART,PART…] [-w WORK] [-s SECONDS] [-l LLAMA] [-t TEST]… OUT MOEFLUX
#
# OUT is a folder for logs, MOEFLUX the binary. LLAMA is llama.cpp's source (tar.xz), of which llama-bench is built
# without what it does not need, or the binary. TEST is the test binary of kernels (`cargo test -p moeflux-compute --test it
# --no-run` names it). WORK keeps the synthetic model, llama.cpp and results,
# so that parts can run in several calls; SECONDS is for all of a call's parts (560), each of which has a limit of its own.
#
# Parts, in this order, by default all:
#   start      devices, and how long the first token takes
#   backends   logits of every test model on the GPU beside the processor's; experts that come and go change no bit
#   operations the tests on the GPU alone
#   memcheck   compute-sanitizer over the tests and over models whose attention is on tensor cores
#   racecheck  the same for races within groups
#   bits       logits of the synthetic model with 9 GiB are those with all of its experts resident
#   resident   speed with everything in the GPU's memory, interleaved with llama.cpp
#   elsewhere  speed with about half of the experts in the GPU's memory, interleaved with llama.cpp
#   share      decode with about half of the experts in the GPU's memory, by the part that the processor computes
#   serving    speed of several sequences at once, in the engine and over HTTP
#   plan       what `moeflux plan` predicts beside what is measured
#   profile    where a token's time goes
#   limits     logits of 700 positions, budgets that are too small
#   table      medians of resident and elsewhere
#
# Ends with 1 if anything is BAD.
set -uo pipefail
here=$(dirname "$(realpath "$0")")
usage() { sed -n '2,29s/^# \{0,1\}//p' "$0" >&2; exit 2; }

limits="start:60 backends:240 operations:200 memcheck:450 racecheck:450 bits:90 resident:240 elsewhere:240 share:240 serving:200 plan:240 profile:90 limits:60 table:20"
parts=$(echo "$limits" | tr ' ' '\n' | cut -d: -f1 | paste -sd,)
work=/tmp/moeflux-cuda seconds=560 llama="" inner="" tests=()
# The modules of the test binary that run operations on devices.
operations=(ops:: draws::)
while getopts p:w:s:l:t:x: option; do
  case $option in
  p) parts=$OPTARG ;;
  w) work=$OPTARG ;;
  s) seconds=$OPTARG ;;
  l) llama=$(realpath "$OPTARG") ;;
  t) tests+=("$(realpath "$OPTARG")") ;;
  x) inner=$OPTARG ;; # This call is that part.
  *) usage ;;
  esac
done
arguments=("$@")
shift $((OPTIND - 1))
[ $# = 2 ] || usage
mkdir -p "$1" "$work"
out=$(realpath "$1") moeflux=$(realpath "$2") work=$(realpath "$work")
PATH=$PATH:/usr/local/cuda/bin
fixtures=$here/../crates/engine/tests/fixtures
model=$work/model.gguf
llama_bench=$work/llama/build/bin/llama-bench
[ -z "$llama" ] || [ ! -x "$llama" ] || llama_bench=$llama
turns=2
budget=9GiB
# Makes as much of the GPU's memory be in use as llama.cpp has with the experts of 24 of 48 layers.
equal=10.75GiB

# --- what parts need ---

wait_for() { # file, log
  while [ ! -e "$1" ]; do
    [ -e "$1.failed" ] && { echo "BAD: $1 could not be made: $(tail -3 "$2")"; return 1; }
    sleep 1
  done
}
need_model() { wait_for "$model" "$work/synth.log"; }
# Succeeds if there is one to compare with.
has_peer() { [ -n "$llama" ] && { [ "$llama_bench" = "$llama" ] || wait_for "$llama_bench.done" "$work/llama-build.log"; }; }

make_model() {
  [ -e "$model" ] && return
  rm -f "$model.failed"
  (nice "$moeflux" synth qwen3-30b-a3b "$model.part" --force && mv "$model.part" "$model") >"$work/synth.log" 2>&1 ||
    touch "$model.failed"
}
make_llama() {
  { [ -z "$llama" ] || [ -x "$llama" ] || [ -e "$llama_bench.done" ]; } && return
  rm -rf "$work/llama"
  mkdir -p "$work/llama/build/bin"
  (tar -C "$work/llama" --strip-components 1 -xf "$llama" &&
    cmake -S "$work/llama" -B "$work/llama/build" -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90 -DCMAKE_BUILD_TYPE=Release \
      -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF \
      -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DBUILD_SHARED_LIBS=OFF &&
    nice cmake --build "$work/llama/build" --target llama-bench -j "$(nproc)" &&
    touch "$llama_bench.done") >"$work/llama-build.log" 2>&1 || touch "$llama_bench.done.failed"
}

# --- parts ---

part_start() {
  "$moeflux" devices
  time "$moeflux" run demo "Once upon a time" --backend cuda --max-tokens 8 --temperature 0
}

part_backends() {
  python3 "$here/compare_backends.py" "$moeflux" --jobs "$(nproc)" >"$work/backends.log" 2>&1
  grep -A2 BAD "$work/backends.log" | cut -c1-160 | head -24
  tail -3 "$work/backends.log"
}

# Failures of a test binary's log.
failures() { grep -E "^test .*FAILED|panicked|test result|ERROR SUMMARY|RACECHECK SUMMARY" -A1 "$1" | grep -v "^--" | cut -c1-240 | tail -20; }

part_operations() {
  local test code
  for test in "${tests[@]}"; do
    MOEFLUX_TEST_ALL=1 MOEFLUX_TEST_ONLY=CUDA "$test" "${operations[@]}" --test-threads 8 >"$work/operations.log" 2>&1
    code=$?
    [ $code = 0 ] && echo "$(basename "$test"): fine" || echo "BAD: $(basename "$test"): exit $code"
    failures "$work/operations.log"
  done
  [ ${#tests[@]} -gt 0 ] || echo "BAD: no tests were given"
}

sanitize() {
  local tool=$1 test run name mode chunk part parts kept="$work/$1"
  local checked=(compute-sanitizer --tool "$tool" --error-exitcode 9)
  # Copies in bulk have a barrier for each group of each kernel.
  [ "$tool" != racecheck ] || checked+=(--num-cuda-barriers 65536)
  mkdir -p "$kept"
  # What is still running then is ended, so that the rest can be told.
  export kept deadline=$(($(date +%s) + (seconds < 450 ? seconds : 450) - 20))
  # Prompts and tokens of small models; then a prompt and tokens beyond 256 keys, whose attention is on tensor cores.
  for run in "qwen3_moe_q4_k_m int8 48" "qwen3_moe_q4_k_m int8 4" "gpt_oss_mxfp4 int8 4" "gpt_oss_mxfp4 f32 48"; do
    read -r name mode chunk <<<"$run"
    checked_run "${run// /-}" "${checked[@]}" "$moeflux" logits "$fixtures/gguf/$name/model.gguf" --backend cuda \
      --chunk "$chunk" --tokens "$(seq -s, 1 40)" --out "$kept/logits" --activations "$mode" &
  done
  # Experts that come and go.
  for mode in 1300KiB 800KiB; do
    checked_run "qwen3_moe_q4_k_m-in-$mode" "${checked[@]}" "$moeflux" logits \
      "$fixtures/gguf/qwen3_moe_q4_k_m/model.gguf" --backend cuda --device-memory $mode --chunk 4 \
      --tokens "$(seq -s, 1 40)" --out "$kept/logits" --activations int8 &
  done
  checked_run attention-on-tensor-cores "${checked[@]}" "$moeflux" run demo \
    "$(printf 'The cat and the dog went out to play. %.0s' $(seq 32))" --backend cuda --max-tokens 8 --temperature 0 &
  # Every test of operations is a process of its own, of the binary with most cases several. racecheck takes longer than
  # a call may: it resumes where the last call in WORK ended.
  export MOEFLUX_TEST_ONLY=CUDA
  export -f checked_run checked_test
  for test in "${tests[@]}"; do
    "$test" "${operations[@]}" --list --format terse | sed -n "s|: test\$||p" | while read -r name; do
      case $name in
      ops::linear | ops::embed | ops::*every_encoding) parts=16 ;;
      ops::*) parts=4 ;;
      *) parts=1 ;;
      esac
      for part in $(seq 0 $((parts - 1)) | sed "s|$|/$parts|"); do echo "$test $name $part"; done
    done
  done | xargs -P "$(nproc)" -L 1 bash -c 'checked_test "$@"' - "${checked[@]}"
  wait
  for run in "$kept"/*.status; do
    verdict "$tool" "${run%.status}"
  done | tee "$kept/verdicts" | grep -v ": fine"
  for run in "${operations[@]}" qwen3_moe gpt_oss attention-on; do
    echo "$tool, $run: $(grep -c ", $run.*: fine" "$kept/verdicts") of $(grep -c ", $run" "$kept/verdicts") runs are fine"
  done
}
# Runs a command until the deadline, unless an earlier call has; its output and exit status go to files.
checked_run() { # name, command…
  local at="$kept/$1" left=$((deadline - $(date +%s)))
  shift
  [ "$(cat "$at.status" 2>/dev/null)" != 0 ] || return 0
  echo 124 >"$at.status"
  [ $left -gt 0 ] || return 0
  timeout $left "$@" >"$at.log" 2>&1
  echo $? >"$at.status"
}
checked_test() { # checker…, test binary, name of the test, part of its cases
  local checker=("${@:1:$#-3}") test="${*: -3:1}" name="${*: -2:1}" part="${*: -1}"
  MOEFLUX_TEST_PART=$part checked_run "$name-${part%/*}" \
    "${checker[@]}" "$test" --exact "$name" --test-threads 1
}
verdict() { # tool, files
  local code verdict=fine
  code=$(cat "$2.status")
  [ "$code" = 0 ] || verdict="BAD: exit $code"
  grep -qs "before first instrumented API call" "$2.log" && grep -q "test result: ok" "$2.log" && verdict="fine, without the GPU"
  [ "$code" = 124 ] && verdict="cut off by its limit, nothing found so far"
  grep -qs "ERROR SUMMARY: [1-9]\|RACECHECK SUMMARY: [1-9]" "$2.log" && verdict="BAD: findings"
  echo "$1, $(basename "$2"): $verdict, $(grep -s SUMMARY "$2.log" | tail -1)"
  cat "$2.log" >>"$work/sanitizer.log" 2>/dev/null
}
part_memcheck() { sanitize memcheck; }
part_racecheck() { sanitize racecheck; }

part_bits() {
  need_model || return
  local memory
  for memory in 100GiB $budget; do
    "$moeflux" logits "$model" --backend cuda --device-memory $memory --activations int8 --chunk 20 \
      --tokens "$(seq -s, 1000 7 1300 | cut -d, -f1-43)" --out "$work/$memory" || echo "BAD: $memory"
  done
  cmp "$work/100GiB" "$work/$budget" && echo "logits are the same bits" || echo "BAD: other bits"
}

# Runs a command and says how much memory of the GPU was in use at most.
watched() {
  nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -l 1 >"$work/used" 2>/dev/null &
  local watcher=$!
  "$@"
  kill "$watcher"
  echo "most memory of the GPU in use: $(sort -n "$work/used" | tail -1) MiB"
}
# Figures go to the results by row and program: what the table is made of.
figure() { # row, program, test
  awk -v row="$1" -v program="$2" -v test="$3" '
    { line = $0; gsub(/[|]/, " ", line); n = split(line, word, " ") }
    { for (i = 1; i <= n; i++) if (word[i] == test || index(word[i], test "@") == 1)
        for (j = n; j > i; j--) if (word[j] == "±") { printf "%s\t%s\t%s\n", row, program, word[j - 1]; next } }'
}
measured() { # row, program, test, command…
  local row=$1 program=$2 test=$3
  shift 3
  "$@" 2>&1 | tee -a "$work/bench.log" | tee >(figure "$row" "$program" "$test" >>"$work/results.tsv") | grep -E "pp|tg|a token|most|rror"
}
ours() { local row=$1 test=$2; shift 2; measured "$row" moeflux "$test" "$moeflux" bench "$model" --backend cuda "$@"; }
theirs() { local row=$1 test=$2; shift 2; has_peer && measured "$row" llama.cpp "$test" "$llama_bench" -m "$model" -fa 1 "$@"; }

part_resident() {
  need_model || return
  local turn
  for turn in $(seq $turns); do
    ours "all resident: prefill of 512" pp512 --chunk 2048 -p 512 -n 0 -d 0 -r 3
    theirs "all resident: prefill of 512" pp512 -r 3 -p 512 -n 0 -ub 2048
    ours "all resident: prefill of 2048" pp2048 --chunk 2048 -p 2048 -n 0 -d 0 -r 3
    theirs "all resident: prefill of 2048" pp2048 -r 3 -p 2048 -n 0 -ub 2048
    ours "all resident: decode of 128" tg128 --chunk 2048 -p 0 -n 128 -d 0 -r 3
    theirs "all resident: decode of 128" tg128 -r 3 -p 0 -n 128
    ours "all resident: decode of 64 after 4096" tg64 --chunk 2048 -p 0 -n 64 -d 4096 -r 3
    theirs "all resident: decode of 64 after 4096" tg64 -r 3 -p 0 -n 64 -d 4096
  done
}

part_elsewhere() {
  need_model || return
  local turn setting memory layers
  for turn in $(seq $turns); do
    for setting in "$budget 26" "$equal 24"; do
      read -r memory layers <<<"$setting"
      ours "$memory: prefill of 512" pp512 --device-memory "$memory" -p 512 -n 0 -d 0 -r 2
      watched ours "$memory: decode of 64" tg64 --device-memory "$memory" -p 0 -n 64 -d 0 -r 2
      theirs "$memory: prefill of 512" pp512 -r 2 -p 512 -n 0 -t "$(nproc)" -ub 2048 -ncmoe "$layers"
      watched theirs "$memory: decode of 64" tg64 -r 2 -p 0 -n 64 -t "$(nproc)" -ncmoe "$layers"
    done
  done
}

part_share() {
  need_model || return
  local threads part own="--device-memory $budget -p 0 -d 128 -n 64 -r 3"
  for threads in $(nproc) $(($(nproc) / 2)) $(($(nproc) / 4)); do
    echo "$threads threads, parts 0 to 1, then chosen:"
    for part in 0 0.2 0.3 0.4 0.5 0.6 0.7 0.8 1; do
      ours "share $part of $threads threads" tg64 $own --threads "$threads" --processor-share $part
    done
    ours "share of $threads threads" tg64 $own --threads "$threads"
  done
}

part_serving() {
  need_model || return
  local turn sampling
  for turn in $(seq $turns); do
    "$moeflux" bench "$model" --backend cuda -p 0 -n 32 -d 128 -b 1,2,4,8,14,15,16,32,64,128,256 -r 2
  done 2>&1 | tee "$work/serving.log" | grep -E "tg|rror"
  "$moeflux" bench "$model" --backend cuda -p 0 -n 32 -d 4096 -b 1,8,32 -r 2 2>&1 | tee -a "$work/serving.log" | grep -E "tg|rror"
  for sampling in '{"temperature": 0}' '{"temperature": 0.8, "top_k": 40, "top_p": 0.9}' '{"temperature": 1}'; do
    echo "$sampling"
    python3 "$here/serve_load.py" scale "$model" --binary "$moeflux" --backend cuda --kv-tokens 65536 --sequences 1 8 16 32 64 --rounds 1 \
      --sampling "$sampling"
  done 2>&1 | tee -a "$work/serving.log"
}

part_plan() {
  need_model || return
  python3 "$here/validate_plan.py" --moeflux "$moeflux" --cuda "$model" --turns 2 --json "$work/plan.json"
}

part_profile() {
  need_model || return
  : >"$work/profile.log"
  "$moeflux" bench "$model" --backend cuda -p 0 -n 64 -d 0,4096 -r 1 --profile 2>&1 | tee -a "$work/profile.log" | grep -v "^$" | head -50
  "$moeflux" bench "$model" --backend cuda --device-memory $budget -p 0 -n 64 -d 0 -r 1 --profile 2>&1 |
    tee -a "$work/profile.log" | grep -v "^$" | head -30
}

part_limits() {
  need_model || return
  "$moeflux" logits "$model" --backend cuda --device-memory $budget --activations int8 --chunk 700 \
    --tokens "$(seq -s, 1 700)" --out "$work/every" && echo "700 positions: $(stat -c %s "$work/every") bytes"
  local memory
  for memory in 256MiB 1GiB; do
    "$moeflux" bench "$model" --backend cuda --device-memory $memory -p 8 -n 1 -r 1 2>&1 | tail -1
  done
}

part_table() {
  touch "$work/results.tsv"
  echo "| tokens/s, medians of turns | llama.cpp | moeflux | ratio |"
  echo "| :-- | --: | --: | --: |"
  sort -t$'\t' -k1,1 -k2,2 -k3,3g "$work/results.tsv" | awk -F'\t' '
    function median(key) { n = count[key]; return n ? (n % 2 ? value[key, (n + 1) / 2] : (value[key, n / 2] + value[key, n / 2 + 1]) / 2) : 0 }
    { key = $1 SUBSEP $2; value[key, ++count[key]] = $3; if (!($1 in seen)) { seen[$1] = 1; order[++rows] = $1 } }
    END { for (i = 1; i <= rows; i++) {
      peer = median(order[i] SUBSEP "llama.cpp"); own = median(order[i] SUBSEP "moeflux")
      printf "| %s | %s | %.1f | %s |\n", order[i], peer ? sprintf("%.1f", peer) : "", own, peer ? sprintf("%.2f", own / peer) : "" } }'
}

# --- running them ---

if [ -n "$inner" ]; then
  "part_$inner"
  exit
fi
known=" $(echo "$limits" | tr ' ' '\n' | cut -d: -f1 | tr '\n' ' ')"
for part in ${parts//,/ }; do
  [[ $known == *" $part "* ]] || { echo "no part $part" >&2; usage; }
done
# What parts wait for is made beside the first of them.
[[ $parts =~ resident|elsewhere ]] && { make_llama & }
[[ $parts =~ bits|resident|elsewhere|share|serving|plan|profile|limits ]] && { make_model & }
for entry in $limits; do
  part=${entry%:*} limit=${entry#*:} left=$((seconds - SECONDS))
  [[ ,$parts, == *,$part,* ]] || continue
  printf '\n== %s (%s s)\n' "$part" "$SECONDS"
  [ "$part" = table ] || [ "$left" -gt 20 ] || { echo "no time left: run it with -p $part"; continue; }
  [ "$part" = table ] || [ "$limit" -le "$left" ] || limit=$left
  timeout --kill-after=5 "$limit" "$0" -x "$part" "${arguments[@]}" 2>&1 | tee "$work/part-$part.log"
  [ "${PIPESTATUS[0]}" != 124 ] || echo "cut off after $limit s" | tee -a "$work/part-$part.log"
done
cp "$work"/{backends,sanitizer,bench,serving,profile}.log "$work"/{plan.json,results.tsv} "$out" 2>/dev/null
cat "$work"/part-*.log >"$out/parts.log"
printf '\n== done (%s s)\n' "$SECONDS"
# What earlier calls in WORK found counts too, until its part runs again.
if grep -h "BAD" "$work"/part-*.log | cut -c1-200 | head -20 | grep .; then
  echo "something is BAD, see above"
  exit 1
fi
