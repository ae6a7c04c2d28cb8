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
# What the emulated machine of `make test-rdma` needs: programs, and libraries that Debian's pyverbs is linked with.
declare -A emulation_of=(
  [qemu-system-x86_64]=qemu-system-x86
  [busybox]=busybox-static
  [cpio]=cpio
  [depmod]=kmod
  [rdma]=iproute2
)
declare -A library_of=(
  [librdmacm.so.1]=librdmacm1
  [libmlx5.so.1]=ibverbs-providers
  [libpython3.11.so.1.0]=libpython3.11
)
PATH=$PATH:/usr/sbin:/sbin
missing=() emulation=()
for program in "${!package_of[@]}"; do
  command -v "$program" >/dev/null 2>&1 || missing+=("${package_of[$program]}")
done
for program in "${!emulation_of[@]}"; do
  command -v "$program" >/dev/null 2>&1 || emulation+=("${emulation_of[$program]}")
done
libraries=$(ldconfig -p 2>/dev/null || true)
for library in "${!library_of[@]}"; do
  [[ $libraries == *"$library"* ]] || emulation+=("${library_of[$library]}")
done
[ ${#missing[@]} -eq 0 ] && [ ${#emulation[@]} -eq 0 ] && exit 0
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u | sed '/^$/d')
mapfile -t emulation < <(printf '%s\n' "${emulation[@]}" | sort -u | sed '/^$/d')

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "not installed: ${missing[*]} ${emulation[*]} (needs root and apt-get; tests that use them are skipped)" >&2
  exit 0
fi
echo "installing ${missing[*]} ${emulation[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# The Debian packages would start their services at once; the tests start their own on temporary ports.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
if [ ${#missing[@]} -gt 0 ]; then
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
# Other systems than Debian 12 do not have all of them; make test-rdma says then what it lacks.
if [ ${#emulation[@]} -gt 0 ]; then
  apt-get install -y -qq --no-install-recommends "${emulation[@]}" >/dev/null || echo "not installed: ${emulation[*]}" >&2
fi
