#!/usr/bin/env bash
# Rewrite constraints.txt from a fresh install of every extra. Usage: scripts/pin.sh [TORCH_VERSION]
set -euo pipefail
cd "$(dirname "$0")/.."
torch=${1:-2.13.0}
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "torch==$torch" --editable ".[dev,bench,docs]"
{
    echo "# Everything that the tests, the benchmarks and the docs install. Written by scripts/pin.sh"
    "$venv/bin/python" -m pip freeze --exclude-editable | sed 's/+cpu$//' | sort --ignore-case
} >"$venv/constraints.txt"
cp "$venv/constraints.txt" constraints.txt
