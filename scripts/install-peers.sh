#!/usr/bin/env bash
# Peers that `cachepilot bench` measures us against, each in an environment of its own under .peers/: their pins clash with ours.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if [ ! -x .peers/litellm/bin/litellm ]; then
  "$python" -m venv .peers/litellm
  .peers/litellm/bin/python -m pip install --quiet --disable-pip-version-check 'litellm[proxy]>=1.80'
fi
.peers/litellm/bin/python -c "from importlib.metadata import version; print('litellm', version('litellm'))"
