#!/usr/bin/env bash
# The test command of the project.
#
#   bash launch/test.sh              every step
#   bash launch/test.sh unit ranks   only these
#
# Steps: format lint types imports size unit inprocess ranks docs.
# Every step runs even if an earlier one failed; the exit code is 1 if any failed.
#
# ZORSE_VENV   virtual environment to use (default: .venv here, made if absent)
# PYTHON       interpreter that makes it (default: python3)
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

ALL_STEPS="format lint types imports size unit inprocess ranks docs"
VENV="${ZORSE_VENV:-.venv}"

export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
export OMP_NUM_THREADS=1
export WANDB_MODE=offline
export TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1

# Installs once for each content of the two files that decide what is installed. The folder counts
# too: an editable install points at it, and two clones may share one environment.
install() {
  local wanted stamp="$VENV/.zorse-installed"
  wanted="$( (pwd; cat pyproject.toml constraints.txt) | cksum)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    return 0
  fi
  echo "== install into $VENV"
  local start=$SECONDS
  if [ ! -x "$VENV/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$VENV" || return 1
  fi
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    -c constraints.txt -e ".[dev,demo]" || return 1
  echo "$wanted" > "$stamp"
  echo "== install: ok ($((SECONDS - start)) s)"
}

run_step() {
  case "$1" in
    format) ruff format --check . ;;
    lint) ruff check . ;;
    types) mypy ;;
    imports) lint-imports --no-logo ;;
    size) python tools/size_budget.py ;;
    unit | inprocess | ranks | docs) python -m pytest -q "tests/$1" ;;
    *) echo "unknown step '$1'; there are: $ALL_STEPS"; return 2 ;;
  esac
}

install || { echo "== install: FAILED"; exit 1; }
export PATH="$(cd "$VENV" && pwd)/bin:$PATH"

failed=""
for step in ${*:-$ALL_STEPS}; do
  echo "== $step"
  start=$SECONDS
  if run_step "$step"; then result=ok; else result=FAILED; failed="$failed $step"; fi
  echo "== $step: $result ($((SECONDS - start)) s)"
done

if [ -n "$failed" ]; then
  echo "== failed:$failed"
  exit 1
fi
echo "== all steps passed ($SECONDS s)"
