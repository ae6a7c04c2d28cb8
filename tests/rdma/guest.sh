# In the guest: one soft-RoCE device, looped to itself, then the checks by the project's own Python on the project's own files.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
set -e
cd "$(dirname "$0")/../.."
ip link add roce0 type dummy                 # not "dummy0": the module makes that one
ip addr add 10.9.9.1/24 dev roce0            # before "rdma link add", or there is no IPv4 GID
ip link set roce0 mtu 4500 up                # 4500 or more gives an RDMA MTU of 4096
rdma link add rxe0 type rxe netdev roce0
. "$WORK/environment"
read -r up _ </proc/uptime; echo "guest: up $up s, one soft-RoCE device"
stty -F /dev/ttyS1 -echo
exec "$PYTHON" -S -m tests.rdma </dev/ttyS1 2>&1
