#!/usr/bin/env bash
# copyright.sh: writes Debian's `copyright` of the binary: the project's licence and those of the libraries in its web page.
set -euo pipefail
cd "$(dirname "$0")/.."

# A text as the body of a field.
body() {
  sed -e 's/[[:space:]]*$//' -e 's/^$/./' -e 's/^/ /'
}

cat <<EOF
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: moeflux

Files: *
Copyright: the moeflux authors
License: MIT or Apache-2.0
 Of the Apache License there is a copy in /usr/share/doc/moeflux/LICENSE-APACHE, and in
 /usr/share/common-licenses/Apache-2.0. The other one:
 .
EOF
body <LICENSE-MIT
for file in crates/server/src/page/vendor/*.LICENSE; do
  printf '\nFiles: %s.*\n' "${file%.LICENSE}"
  # One file has all libraries that are in the script of that name.
  printf 'Copyright:\n'
  grep '^Copyright' "$file" | sed -E 's|^Copyright *(\(c\))? *| |' | sort -u
  printf 'License: %s-and-its-parts\n' "$(basename "$file" .LICENSE)"
  body <"$file"
done
