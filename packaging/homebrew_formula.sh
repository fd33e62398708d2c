#!/usr/bin/env bash
# homebrew_formula.sh ARCHIVE URL: prints the formula for the source archive ARCHIVE that is published at URL.
set -euo pipefail
if [ $# -ne 2 ]; then
  echo "usage: $0 ARCHIVE URL" >&2
  exit 2
fi
archive=$1 url=$2
case $url in https://*) ;; *) echo "$url: expected an https URL" >&2; exit 1 ;; esac
sum=$(if command -v sha256sum >/dev/null; then sha256sum <"$archive"; else shasum -a 256 <"$archive"; fi)
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
# What identifies the project: where the archive is, without the part that names it.
homepage=$(sed -E 's#^(https://[^/]+/[^/]+/[^/]+).*#\1#' <<<"$url")
formula=$(<packaging/moeflux.rb.in)
formula=${formula//@VERSION@/$version}
formula=${formula//@URL@/$url}
formula=${formula//@SHA256@/${sum%% *}}
formula=${formula//@HOMEPAGE@/$homepage}
printf '%s\n' "$formula"
