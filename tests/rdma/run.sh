#!/usr/bin/env bash
# Real RDMA without hardware for it: boots Debian's kernel with soft-RoCE (rdma_rxe) in qemu, on this machine's own files (read only,
# under an overlay in memory), and runs tests/rdma/guest.py in it. Status: that of the checks; 99: the guest gave none.
# RDMA_GUEST_DIR: where the kernel is kept and results.json is left; LIMIT: seconds that the guest may take; what is left of five minutes.
set -euo pipefail
{                                                               # read whole before it runs: it may be edited meanwhile
here=$(cd "$(dirname "$0")" && pwd); root=$(cd "$here/../.." && pwd)
work=${RDMA_GUEST_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/cachepilot/rdma-guest}
mkdir -p "$work"; work=$(realpath "$work")
export PATH=$PATH:/usr/sbin:/sbin

missing() {
  echo "test-rdma: $1" >&2
  [ "${CACHEPILOT_REQUIRE_ALL:-}" = 1 ] && exit 1
  echo "test-rdma: skipped" >&2; exit 0
}
for program in qemu-system-x86_64 busybox cpio depmod modprobe ip rdma dpkg-deb apt-get; do
  command -v "$program" >/dev/null || missing "needs the program $program: run scripts/install-system-packages.sh as root (Debian)"
done
python=$root/.venv/bin/python
[ -x "$python" ] || missing "needs .venv: run make setup-dev"

exec 9>"$work/lock"; flock 9                                    # a second run waits for the first one
began=$SECONDS

if [ ! -s "$work/boot/image/order" ]; then                     # once: kernel 70 MB, pyverbs 1 MB
  echo "test-rdma: fetching kernel and pyverbs into $work"
  build=$(mktemp -d "$work/build.XXXXXX"); trap 'rm -rf "$build"' EXIT
  [ "$(id -u)" -eq 0 ] && options=(-o APT::Sandbox::User=root) || options=()
  package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends:/{print $2; exit}')
  if [ -z "$package" ] && [ "$(id -u)" -eq 0 ]; then
    apt-get update -qq
    package=$(apt-cache depends linux-image-amd64 | awk '/Depends:/{print $2; exit}')
  fi
  [ -n "$package" ] || missing "needs Debian's package lists: run apt-get update as root"
  version=${package#linux-image-}
  # Not apt-get install: python3-pyverbs would bring rdma-core and udev, the kernel a boot loader.
  (cd "$build"
   apt-get download -qq "${options[@]}" "$package" python3-pyverbs ||
     { apt-get update -qq && apt-get download -qq "${options[@]}" "$package" python3-pyverbs; })
  dpkg-deb -x "$build"/python3-pyverbs_*.deb "$build/pyverbs"
  mkdir -p "$build/kernel" "$build/image"/{bin,m,proc,sys,dev,lower,rw,new} "$work/boot"
  dpkg-deb --fsys-tarfile "$build/$package"_*.deb |
    tar x -C "$build/kernel" --wildcards './boot/vmlinuz-*' '*/modules/*'
  depmod -b "$build/kernel" "$version"
  cp "$(command -v busybox)" "$build/image/bin/"
  for module in virtio_pci 9pnet_virtio 9p overlay dummy ib_uverbs crc32_generic rdma_rxe; do
    modprobe -d "$build/kernel" -S "$version" --show-depends "$module"
  done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' | while read -r file; do
    name=$(basename "${file%.xz}")
    case $file in *.xz) xz -dc "$file" >"$build/image/m/$name" ;; *) cp "$file" "$build/image/m/$name" ;; esac
    strip --strip-debug "$build/image/m/$name" 2>/dev/null || true
    echo "$name"
  done >"$build/image/order"
  rm -rf "$work/pyverbs"; mv "$build/pyverbs" "$work/pyverbs"
  cp "$build/kernel/boot/vmlinuz-$version" "$work/boot/vmlinuz"
  rm -rf "$work/boot/image"; mv "$build/image" "$work/boot/image"
  rm -rf "$build"; trap - EXIT
fi
# The first process is the tree's own, so the image is made anew: it is small.
cp "$here/init" "$work/boot/image/init"; chmod 755 "$work/boot/image/init"
(cd "$work/boot/image" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/boot/initrd.new"
mv "$work/boot/initrd.new" "$work/boot/initrd.gz"

# A copy, so that what is compiled is what runs, even while somebody edits.
mkdir -p "$work/tree/tests/rdma"
rm -rf "$work/tree/serving"
cp -a "$root/serving" "$work/tree/serving"
cp -a "$here"/*.py "$here"/*.sh "$work/tree/tests/rdma/"
mkdir -p "$work/tree/tests/serving"
cp -a "$root"/tests/{__init__,waiting,neighbour_checks}.py "$work/tree/tests/"
cp -a "$root"/tests/serving/{__init__,arenas,neighbours}.py "$work/tree/tests/serving/"

site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Compiling takes minutes in the guest: the host does it, for the guest's processor.
cat >"$work/environment" <<VARIABLES
export PYTHONPATH=$work/pyverbs/usr/lib/python3/dist-packages:$site NUMBA_CACHE_DIR=$work/numba NUMBA_CPU_NAME=nehalem NUMBA_CPU_FEATURES=
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
VARIABLES
(. "$work/environment"; "$python" -c "import pyverbs.device") ||
  missing "pyverbs of this Debian does not go with $("$python" --version): needs the libraries and the Python that it was made for"

# Beside the guest, which boots and imports what does not depend on it meanwhile, and waits for a line from here.
compile() {
  (. "$work/environment"; cd "$work/tree"; "$python" -m tests.rdma.compile >&2) 9>&- && said=go || said=no
  while echo "$said"; do sleep 1; done 2>/dev/null
}

limit=${LIMIT:-$((295 - SECONDS + began))}                    # five minutes in all
results=$work/results.json; log=$work/guest.log; console=$work/console.log
rm -f "$results" "$log" "$console"
set +e
compile | timeout --foreground --kill-after=10 "$limit" qemu-system-x86_64 -machine q35 -accel tcg,thread=multi -cpu Nehalem -smp 6 -m "${MEMORY:-2048}" \
  -nodefaults -no-user-config -display none -no-reboot -kernel "$work/boot/vmlinuz" -initrd "$work/boot/initrd.gz" \
  -append "console=ttyS0 loglevel=4 panic=-1 mitigations=off nokaslr random.trust_cpu=on tsc=reliable SCRIPT=$work/tree/tests/rdma/guest.sh WORK=$work PYTHON=$python" \
  -chardev file,id=c0,path="$console" -serial chardev:c0 -chardev stdio,id=c1,signal=off -serial chardev:c1 \
  -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
  -device virtio-9p-pci,fsdev=root,mount_tag=hostroot 2>"$work/qemu.log" | sed -u 's/\r$//' | tee "$log" |
  sed -u '/^GUEST_\|^RESULTS \|^go$\|^no$/d'  # the last two: what it was told, as its terminal repeats it
ended=${PIPESTATUS[1]}
set -e
status=$(sed -n 's/^GUEST_EXIT //p' "$log" | tail -1)
sed -n 's/^RESULTS //p' "$log" | tail -1 >"$results"
if [ -z "$status" ]; then
  tail -n 30 "$work/qemu.log" "$console"
  [ "$ended" = 124 ] && echo "test-rdma: the guest was ended after $limit s"
  status=99
fi
checks=$(grep -c '^ok ' "$log" || true)
up=$(sed -n 's/^GUEST_UP //p' "$log" | tail -1)
echo "test-rdma: $checks checks, status $status, guest up ${up:-?} s, $((SECONDS - began)) s in all, load $(cut -d' ' -f1 /proc/loadavg); $results"
exit "$status"
}
