#!/usr/bin/env bash
# Install the programs that some tests and benchmarks need, where apt and root are there. Elsewhere it only says what is missing:
# the tests that need a missing program are skipped by name.
set -euo pipefail

declare -A package_of=(
  [redis-server]=redis-server
  [prometheus]=prometheus
  [promtool]=prometheus
  [chromium]=chromium
  [wrk]=wrk
)
missing=()
for program in "${!package_of[@]}"; do
  command -v "$program" >/dev/null 2>&1 || missing+=("${package_of[$program]}")
done
[ ${#missing[@]} -eq 0 ] && exit 0
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "not installed: ${missing[*]} (needs root and apt-get; tests that use them are skipped)" >&2
  exit 0
fi
echo "installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# The Debian packages would start their services at once; the tests start their own on temporary ports.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
