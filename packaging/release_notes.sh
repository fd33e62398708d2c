#!/usr/bin/env bash
# release_notes.sh [VERSION]: prints the section of VERSION from CHANGELOG.md; by default Cargo.toml's version.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)}
# From the heading after `## VERSION`, with or without a date behind it, to the next one.
notes=$(awk -v version="$version" '/^## /{found = ($2 == version); next} found' CHANGELOG.md)
if [ -z "${notes//[[:space:]]/}" ]; then
  echo "CHANGELOG.md has no section \"## $version\"" >&2
  exit 1
fi
sed '/./,$!d' <<<"$notes"
