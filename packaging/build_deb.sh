#!/usr/bin/env bash
# build_deb.sh: builds the binary and packs it as packaging/build/moeflux_VERSION_ARCH.deb; prints the package's path.
# With cargo-deb (`cargo install cargo-deb`) by what crates/cli/Cargo.toml says, else with dpkg-deb, the same files.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$PWD/packaging/build
target=${CARGO_TARGET_DIR:-target}
cargo build --release --locked -p moeflux-cli >&2
rm -rf "$build" && mkdir -p "$build"
binary=$target/release/moeflux

"$binary" man "$build/man"
gzip -9n "$build"/man/*.1
mkdir "$build/completions"
for shell in bash zsh fish; do "$binary" completions "$shell" >"$build/completions/$shell"; done
packaging/copyright.sh >"$build/copyright"
version=$("$binary" --version | cut -d ' ' -f 2)
architecture=$(dpkg --print-architecture)
package=$build/moeflux_${version}_$architecture.deb

if cargo deb --version >/dev/null 2>&1; then
  cargo deb -p moeflux-cli --no-build --no-strip --output "$package" >&2
else
  root=$build/root
  install -D -m 755 "$binary" "$root/usr/bin/moeflux"
  install -D -m 644 -t "$root/usr/share/man/man1" "$build"/man/*.1.gz
  install -D -m 644 "$build/completions/bash" "$root/usr/share/bash-completion/completions/moeflux"
  install -D -m 644 "$build/completions/zsh" "$root/usr/share/zsh/vendor-completions/_moeflux"
  install -D -m 644 "$build/completions/fish" "$root/usr/share/fish/vendor_completions.d/moeflux.fish"
  install -D -m 644 -t "$root/usr/share/doc/moeflux" README.md CHANGELOG.md LICENSE-APACHE
  install -D -m 644 -t "$root/usr/share/doc/moeflux" "$build/copyright"
  install -D -m 644 -t "$root/usr/lib/systemd/system" packaging/moeflux.service
  install -D -m 644 -t "$root/etc/moeflux" packaging/serve.toml
  mkdir "$root/DEBIAN"
  echo /etc/moeflux/serve.toml >"$root/DEBIAN/conffiles"
  cat >"$root/DEBIAN/control" <<EOF
Package: moeflux
Version: $version
Architecture: $architecture
Maintainer: The moeflux developers
Section: science
Priority: optional
Installed-Size: $(du -sk --exclude DEBIAN "$root" | cut -f 1)
Depends: libc6 (>= 2.35), libgcc-s1 (>= 4.2)
Description: runs Mixture-of-Experts language models that are bigger than memory
 The dense part of a model stays in memory; the routed experts, which are most
 of it, are read from disk when a router chooses them, through a cache of the
 size that is allowed. It opens GGUF files and safetensors folders as they are,
 answers on the command line, and serves OpenAI's and Anthropic's interfaces.
EOF
  dpkg-deb --root-owner-group --build "$root" "$package" >&2
fi
echo "$package"
