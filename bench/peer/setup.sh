#!/bin/sh
# Makes .venv-peer in the checkout: an environment of its own for the published peer, so that its pins never meet ours.
# Quick when it is there already. Needs a package index; prints what failed and returns 1 otherwise.
set -eu
top=$(cd "$(dirname "$0")/../.." && pwd)
venv="$top/.venv-peer"
version=26.2.0

if [ -f "$venv/.ready-$version" ]; then
    exit 0
fi
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    -c "$top/constraints.txt" torch==2.13.0 "mindstudio-probe==$version"
# Importing is the proof: the package has pulled in more than it declares before.
"$venv/bin/python" -c "from msprobe.pytorch import PrecisionDebugger" >/dev/null
touch "$venv/.ready-$version"
