#!/usr/bin/env bash
# Peers that `cachepilot bench` measures us against. Those whose pins clash with ours get an environment of their own under .peers/;
# the others (pyproject's extra "bench") live beside us.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c "import cachetools" 2>/dev/null; then
  "$python" -m pip install --quiet --disable-pip-version-check --constraint requirements.lock cachetools
fi
scripts/install-libcachesim.sh "$python"
"$python" -c "from importlib.metadata import version; print('libcachesim', version('libcachesim')); print('cachetools', version('cachetools'))"
if [ ! -x .peers/litellm/bin/litellm ]; then
  "$python" -m venv .peers/litellm
  .peers/litellm/bin/python -m pip install --quiet --disable-pip-version-check 'litellm[proxy]>=1.80'
fi
.peers/litellm/bin/python -c "from importlib.metadata import version; print('litellm', version('litellm'))"
