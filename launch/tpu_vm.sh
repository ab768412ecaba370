#!/usr/bin/env bash
# One training run on a Cloud TPU: from nothing to a trained model, through preemptions, to deletion.
set -euo pipefail

usage() {
  cat <<'TEXT'
launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE [options] [-- flags of aogpt_jax.main]

Commands, in the order in which they are used:
  create   asks for the TPU (a queued resource) and waits until it is there
  setup    copies the committed tree (git archive HEAD) to every host and installs it
  train    starts `python -m aogpt_jax.main --distributed FLAGS` on every host, in the background
  status   state of the TPU, and of the run on every host
  logs     the end of the log of the first host, followed until Ctrl-C
  resume   after a preemption: deletes what is left of the TPU, then create, setup, train; where
           the TPU is still there, starts the run again. The run continues from its last checkpoint
  delete   deletes the TPU; the bill ends. The run stays where --workdir is

Options:
  --name=NAME      of the TPU
  --zone=ZONE      such as us-central2-b
  --project=ID     default: gcloud's own
  --type=TYPE      create, resume: accelerator type, such as v5litepod-16 or v4-32
  --version=V      create, resume: runtime version, such as v2-alpha-tpuv5-lite or tpu-ubuntu2204-base
  --slices=N       slices of that type, joined over the network (multi-slice); default 1
  --spot           create, resume: cheaper, and may be taken away at any time
  --nfs=HOST:/DIR  setup, resume: a file share (Filestore) that is mounted at /mnt/aogpt on every host
  --poll=SECONDS   between questions whether the TPU is there; default 30
  --dry-run        prints the exact commands and runs none
  --help           this text

train and resume need --config=FILE and --workdir=DIR after `--`; several hosts must all see that
directory (--workdir=/mnt/aogpt/RUN). Example, 16 chips on four hosts:

  launch/tpu_vm.sh create --name=a --zone=us-west4-a --type=v5litepod-16 --version=v2-alpha-tpuv5-lite
  launch/tpu_vm.sh setup  --name=a --zone=us-west4-a --nfs=10.0.0.2:/share
  launch/tpu_vm.sh train  --name=a --zone=us-west4-a -- --config=configs/small.py --workdir=/mnt/aogpt/small
TEXT
}

fail() { echo "error: $*" >&2; exit 2; }

name='' zone='' project='' type='' version='' slices=1 spot='' nfs='' poll=30 dry=''
command=${1:-}
case $command in
  --help | -h) usage; exit 0 ;;
  create | setup | train | status | logs | resume | delete) shift ;;
  '') fail 'no command; one of create, setup, train, status, logs, resume, delete (--help tells more)' ;;
  *) fail "unknown command \"$command\"; one of create, setup, train, status, logs, resume, delete" ;;
esac
while (($#)); do
  case $1 in
    --name=*) name=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --project=*) project=${1#*=} ;;
    --type=*) type=${1#*=} ;;
    --version=*) version=${1#*=} ;;
    --slices=*) slices=${1#*=} ;;
    --spot) spot=1 ;;
    --nfs=*) nfs=${1#*=} ;;
    --poll=*) poll=${1#*=} ;;
    --dry-run) dry=1 ;;
    --help | -h) usage; exit 0 ;;
    --) shift; break ;;
    *) fail "unknown option \"$1\"; flags of the program come after --" ;;
  esac
  shift
done
flags=("$@")

need() {  # need VALUE OPTION EXAMPLE
  [[ -n $1 ]] || fail "--$2 is missing; $command needs it, such as --$2=$3"
}

# Everything that can be known to be missing is, before anything costs money.
need "$name" name my-tpu
need "$zone" zone us-central2-b
[[ $slices =~ ^[1-9][0-9]*$ ]] || fail "--slices=$slices: must be a number of at least 1"
[[ $poll =~ ^[0-9]+$ ]] || fail "--poll=$poll: must be a number of seconds"
[[ -z $nfs || $nfs == *:/* ]] || fail "--nfs=$nfs: must be HOST:/DIRECTORY"
if [[ $command == create || $command == resume ]]; then
  need "$type" type v5litepod-16
  need "$version" version v2-alpha-tpuv5-lite
fi
if [[ $command == train || $command == resume ]]; then
  [[ " ${flags[*]-} " == *' --config='* ]] || fail "--config=FILE is missing after --; $command needs it"
  [[ " ${flags[*]-} " == *' --workdir='* ]] || fail "--workdir=DIR is missing after --; $command needs it"
fi
[[ -n $dry ]] || type -P gcloud > /dev/null || fail 'gcloud is not installed: https://cloud.google.com/sdk'

where=(--zone="$zone")
[[ -z $project ]] || where+=(--project="$project")
if ((slices > 1)); then
  nodes=()
  for ((i = 0; i < slices; i++)); do nodes+=("$name-$i"); done
  node_flags=(--node-prefix="$name" --node-count="$slices")
else
  nodes=("$name")
  node_flags=(--node-id="$name")
fi

run() {  # prints a command, or runs it
  if [[ -n $dry ]]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

on_hosts() {  # on_hosts SHELL_COMMAND: on every host of every slice
  local node
  for node in "${nodes[@]}"; do
    run gcloud compute tpus tpu-vm ssh "$node" "${where[@]}" --worker=all --command="$1"
  done
}

state() {
  gcloud compute tpus queued-resources describe "$name" "${where[@]}" --format='value(state.state)'
}

create() {
  run gcloud compute tpus queued-resources create "$name" "${where[@]}" "${node_flags[@]}" \
    --accelerator-type="$type" --runtime-version="$version" ${spot:+--spot}
  [[ -z $dry ]] || return 0
  local now=''
  while :; do
    now=$(state)
    echo "$name: $now"
    case $now in
      ACTIVE) return 0 ;;
      FAILED | SUSPENDED | SUSPENDING | DELETING)
        fail "$name is $now; look at it with: gcloud compute tpus queued-resources describe $name ${where[*]}" ;;
    esac
    sleep "$poll"
  done
}

setup() {
  local archive node root
  root=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
  archive=${TMPDIR:-/tmp}/aogpt_jax-$name.tar.gz
  run git -C "$root" archive --format=tar.gz --output="$archive" HEAD
  for node in "${nodes[@]}"; do
    run gcloud compute tpus tpu-vm scp "$archive" "$node:aogpt_jax.tar.gz" "${where[@]}" --worker=all
  done
  on_hosts 'mkdir -p aogpt_jax && tar -xzf aogpt_jax.tar.gz -C aogpt_jax && cd aogpt_jax && python3 -m venv .venv && .venv/bin/python -m pip install --quiet -e .[tpu,gpt2,hf]'
  if [[ -n $nfs ]]; then
    on_hosts "sudo apt-get install -y -q nfs-common && sudo mkdir -p /mnt/aogpt && (mountpoint -q /mnt/aogpt || sudo mount -t nfs $nfs /mnt/aogpt) && sudo chmod a+rwx /mnt/aogpt"
  fi
}

train() {
  local quoted
  quoted=$(printf '%q ' "${flags[@]}")
  # A second start on top of a running one is refused by the hosts, not by luck.
  on_hosts "cd aogpt_jax && if [ -f ../aogpt.pid ] && kill -0 \$(cat ../aogpt.pid) 2> /dev/null; then echo already running; else nohup .venv/bin/python -m aogpt_jax.main --distributed ${quoted}>> ../aogpt.log 2>&1 < /dev/null & echo \$! > ../aogpt.pid; fi"
}

remove() {
  run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

case $command in
  create) create ;;
  setup) setup ;;
  train) train ;;
  status)
    now=ACTIVE
    if [[ -n $dry ]]; then
      run gcloud compute tpus queued-resources describe "$name" "${where[@]}" '--format=value(state.state)'
    else
      now=$(state)
      echo "$name: $now"
    fi
    if [[ $now == ACTIVE ]]; then
      on_hosts "hostname; if [ -f aogpt.pid ] && kill -0 \$(cat aogpt.pid) 2> /dev/null; then echo running; else echo not running; fi; tail -n 1 aogpt.log"
    fi ;;
  logs)
    run gcloud compute tpus tpu-vm ssh "${nodes[0]}" "${where[@]}" --worker=0 --command='tail -n 100 -F aogpt.log' ;;
  resume)
    now=''
    [[ -n $dry ]] || now=$(state 2> /dev/null) || now=gone
    if [[ $now == ACTIVE ]]; then
      train
    else
      [[ $now == gone ]] || remove
      create
      setup
      train
    fi ;;
  delete) remove ;;
esac
