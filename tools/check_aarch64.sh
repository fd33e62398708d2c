#!/usr/bin/env bash
# Runs the tests of the CPU's kernels for aarch64, NEON included, on any machine: under qemu's user emulation, with a
# cross compiler to link them (Debian: qemu-user, g++-aarch64-linux-gnu); ends with 77 where something is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu
for program in qemu-aarch64 aarch64-linux-gnu-g++ rustup; do
  if ! command -v "$program" >/dev/null; then
    echo "needs $program"
    exit 77
  fi
done
if ! rustup target add "$target" >/dev/null 2>&1; then
  echo "needs the standard library of $target"
  exit 77
fi
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-g++
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu"
# Emulated GPUs are tested elsewhere: emulated twice they would take too long, and so would compiling their kernels.
export MOEFLUX_TEST_ONLY=CPU
# Should threads stand still, the check must end.
timeout 1200 cargo test --target "$target" -p moeflux-compute --locked \
  --test it "$@" -- vector:: matmul:: quant:: latent_attention:: recurrent_ops::
