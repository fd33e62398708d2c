#!/usr/bin/env bash
# Type-checks the library, Metal included, for a Mac with Apple silicon on any machine that rustup can give that
# target's standard library; ends with 77 where it cannot. Nothing is linked and nothing runs. Server and binary need a C
# compiler for that target (ring).
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-apple-darwin
if ! command -v rustup >/dev/null || ! rustup target add "$target" >/dev/null 2>&1; then
  echo "needs rustup and the standard library of $target"
  exit 77
fi
RUSTFLAGS="-D warnings" cargo check --target "$target" -p moeflux-compute -p moeflux --locked "$@"
