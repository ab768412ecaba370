#!/usr/bin/env bash
# One training run on one machine with NVIDIA GPUs: in the background, and again after a reboot.
set -euo pipefail

usage() {
  cat <<'TEXT'
launch/gpu_node.sh COMMAND [options] [-- flags of aogpt_jax.main]

Commands:
  setup    makes .venv in the project and installs it with CUDA
  train    starts `python -m aogpt_jax.main FLAGS` in the background; the same command continues a run
  status   whether the run of --workdir is running, the end of its log, and the GPUs
  logs     the log of the run of --workdir, followed until Ctrl-C
  stop     asks the run of --workdir to save and end (SIGTERM)

Options:
  --gpus=0,1,…     train: GPUs to use; default: all
  --workdir=DIR    status, logs, stop: the run
  --dry-run        prints the exact commands and runs none
  --help           this text

train needs --config=FILE and --workdir=DIR after `--`. Example:

  launch/gpu_node.sh setup
  launch/gpu_node.sh train -- --config=configs/small.py --workdir=runs/small --config.train.accumulation=64
  launch/gpu_node.sh logs --workdir=runs/small
TEXT
}

fail() { echo "error: $*" >&2; exit 2; }

gpus='' workdir='' dry=''
command=${1:-}
case $command in
  --help | -h) usage; exit 0 ;;
  setup | train | status | logs | stop) shift ;;
  '') fail 'no command; one of setup, train, status, logs, stop (--help tells more)' ;;
  *) fail "unknown command \"$command\"; one of setup, train, status, logs, stop" ;;
esac
while (($#)); do
  case $1 in
    --gpus=*) gpus=${1#*=} ;;
    --workdir=*) workdir=${1#*=} ;;
    --dry-run) dry=1 ;;
    --help | -h) usage; exit 0 ;;
    --) shift; break ;;
    *) fail "unknown option \"$1\"; flags of the program come after --" ;;
  esac
  shift
done
flags=("$@")
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python

run() {
  if [[ -n $dry ]]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

if [[ $command == train ]]; then
  config=''
  for flag in "${flags[@]-}"; do
    case $flag in
      --config=*) config=${flag#*=} ;;
      --workdir=*) workdir=${flag#*=} ;;
    esac
  done
  [[ -n $config ]] || fail '--config=FILE is missing after --; train needs it'
  [[ -n $workdir ]] || fail '--workdir=DIR is missing after --; train needs it'
  [[ -z $gpus || $gpus =~ ^[0-9]+(,[0-9]+)*$ ]] || fail "--gpus=$gpus: must be numbers, such as 0,1"
  [[ -n $dry || -x $python ]] || fail "$python does not exist; run launch/gpu_node.sh setup first"
elif [[ $command != setup ]]; then
  [[ -n $workdir ]] || fail "--workdir=DIR is missing; $command needs it"
fi
pid_file=$workdir/launch.pid log_file=$workdir/launch.log

running() { [[ -f $pid_file ]] && kill -0 "$(cat "$pid_file")" 2> /dev/null; }

case $command in
  setup)
    run python3 -m venv "$root/.venv"
    run "$python" -m pip install --quiet -e "${root}[cuda,gpt2,hf]" ;;
  train)
    [[ -n $dry ]] || ! running || fail "$workdir: already running as process $(cat "$pid_file")"
    environment=()
    [[ -z $gpus ]] || environment=(CUDA_VISIBLE_DEVICES="$gpus")
    start=(env "${environment[@]}" "$python" -m aogpt_jax.main "${flags[@]}")
    if [[ -n $dry ]]; then
      run nohup "${start[@]}"
    else
      mkdir -p "$workdir"
      nohup "${start[@]}" >> "$log_file" 2>&1 < /dev/null &
      echo $! > "$pid_file"
      echo "process $(cat "$pid_file"), log $log_file"
    fi ;;
  status)
    if running; then echo "running as process $(cat "$pid_file")"; else echo 'not running'; fi
    run tail -n 3 "$log_file"
    run nvidia-smi --query-gpu=index,name,utilization.gpu,memory.used --format=csv ;;
  logs) run tail -n 100 -F "$log_file" ;;
  stop)
    running || fail "$workdir: is not running"
    run kill -TERM "$(cat "$pid_file")" ;;
esac
