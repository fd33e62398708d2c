#!/bin/sh
# Cargo for maturin: what it asks to be built of one package is built with the features that the workspace's tests have, of which
# little has to be compiled again.
[ "$1" = rustc ] || exec cargo "$@"
exec cargo build --workspace --lib --tests --locked --message-format json-render-diagnostics
