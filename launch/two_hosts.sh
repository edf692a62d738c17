#!/usr/bin/env bash
# Two hosts on this machine: network namespaces h0 and h1, joined by a wire of a given speed, for the
# stock multi-node launcher. Needs root, iproute2 and the right to make namespaces.
#
#   bash launch/two_hosts.sh [--rate 200mbit] [--slots 2,1] [--state DIR] -- COMMAND ...
#   bash launch/two_hosts.sh lose DIR h1        # from elsewhere: host h1 is gone, all at once
#
# COMMAND runs beside the hosts and reaches them by `ssh` and `pdsh` (small stand-ins on its PATH):
#
#   bash launch/two_hosts.sh -- bash -c \
#     'deepspeed --hostfile $ZORSE_HOSTFILE --master_addr 10.77.0.1 train.py'
#
# Everything is taken down when COMMAND ends, or when this script is interrupted.
set -euo pipefail

usage() { sed -n '2,15p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; exit 2; }

# The wire is cut first, so that the other host hears nothing of the processes that end.
lose() {
  local name
  name="$(cat "$1/$2.netns")"
  touch "$1/$2.lost"
  ip netns exec "$name" ip link set eth0 down
  ip netns pids "$name" | xargs -r kill -9
  exit 0
}

rate="" slots="2,1" state="" made_state=""
[ "${1:-}" = lose ] && { [ $# -eq 3 ] || usage; lose "$2" "$3"; }
while [ $# -gt 0 ]; do
  case "$1" in
    --rate) rate="$2"; shift 2 ;;
    --slots) slots="$2"; shift 2 ;;
    --state) state="$2"; shift 2 ;;
    --) shift; break ;;
    *) usage ;;
  esac
done
[ $# -gt 0 ] || usage
if [ -z "$state" ]; then state="$(mktemp -d)"; made_state=1; fi
mkdir -p "$state/bin"
state="$(cd "$state" && pwd)"

down() {
  trap - EXIT
  local host name
  for host in h0 h1; do
    name="zorse-$$-$host"
    ip netns pids "$name" 2> /dev/null | xargs -r kill -9 || true
    ip netns del "$name" 2> /dev/null || true
    rm -rf "/etc/netns/$name"
  done
  if [ -n "$made_state" ]; then rm -rf "$state"; fi
}
trap down EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for host in h0 h1; do
  name="zorse-$$-$host"
  ip netns add "$name"
  echo "$name" > "$state/$host.netns"
  rm -f "$state/$host.lost"
  # `ip netns exec` shows this file as /etc/hosts.
  mkdir -p "/etc/netns/$name"
  printf '127.0.0.1 localhost\n10.77.0.1 h0\n10.77.0.2 h1\n' > "/etc/netns/$name/hosts"
done
ip link add eth0 netns "zorse-$$-h0" type veth peer name eth0 netns "zorse-$$-h1"
for host in h0 h1; do
  name="zorse-$$-$host"
  ip -n "$name" addr add "10.77.0.$((${host#h} + 1))/24" dev eth0
  ip -n "$name" link set lo up
  ip -n "$name" link set eth0 up
  if [ -n "$rate" ]; then
    ip netns exec "$name" tc qdisc add dev eth0 root tbf rate "$rate" burst 128kb latency 100ms
  fi
done
printf 'h0 slots=%s\nh1 slots=%s\n' "${slots%,*}" "${slots#*,}" > "$state/hostfile"

# What DeepSpeed's launcher hands on to the hosts besides PYTHON*.
{
  echo "GLOO_SOCKET_IFNAME=eth0"
  echo "PATH=$PATH"
  for variable in DS_ACCELERATOR OMP_NUM_THREADS HF_HUB_OFFLINE WANDB_MODE; do
    if [ -n "${!variable:-}" ]; then echo "$variable=${!variable}"; fi
  done
} > "$state/env"

cat > "$state/bin/ssh" << 'SHIM'
#!/usr/bin/env bash
# ssh [options] HOST COMMAND...; a host that is lost cannot be reached, and hangs whoever was there.
state="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
while [[ "${1:-}" == -* ]]; do
  case "$1" in -o | -p | -l | -i) shift 2 ;; *) shift ;; esac
done
host="$1"; shift
[ -f "$state/$host.netns" ] || { echo "ssh: unknown host $host" >&2; exit 255; }
[ -f "$state/$host.lost" ] && exit 255
ip netns exec "$(cat "$state/$host.netns")" unshare --uts \
  bash -c 'hostname "$0"; exec bash -c "$1"' "$host" "$*"
code=$?
[ -f "$state/$host.lost" ] && exec sleep 3600
exit "$code"
SHIM

cat > "$state/bin/pdsh" << 'SHIM'
#!/usr/bin/env bash
# pdsh [options] -w HOSTS COMMAND...: on all at once; the largest exit code.
bin="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
hosts=""
while [[ "${1:-}" == -* ]]; do
  case "$1" in -w) hosts="$2"; shift 2 ;; -f | -l | -R | -t | -u) shift 2 ;; *) shift ;; esac
done
# The hosts share their processes' numbers: by name, those of others would be ended too.
case "$*" in *pkill*) exit 0 ;; esac
number=0 running=()
for host in ${hosts//,/ }; do
  command="${*//%n/$number}"
  (set -o pipefail; "$bin/ssh" "$host" "$command" 2>&1 | sed -u "s/^/$host: /") &
  running+=($!)
  number=$((number + 1))
done
worst=0
for one in "${running[@]}"; do
  wait "$one"; code=$?
  if [ "$code" -gt "$worst" ]; then worst=$code; fi
done
exit "$worst"
SHIM
chmod +x "$state/bin/ssh" "$state/bin/pdsh"

# In the background, for bash hears of no signal while it waits for a command in the foreground.
PATH="$state/bin:$PATH" DS_ENV_FILE="$state/env" ZORSE_HOSTFILE="$state/hostfile" "$@" &
command=$!
trap 'kill -TERM "$command" 2> /dev/null; wait "$command"; exit 130' INT
trap 'kill -TERM "$command" 2> /dev/null; wait "$command"; exit 143' TERM
code=0
wait "$command" || code=$?
exit "$code"
