#!/usr/bin/env bash
# Write requirements.lock anew: one consistent set for the package and all its extras.
# torch is pinned where a CPU build is known to work; raise it here, and nowhere else.
set -euo pipefail
cd "$(dirname "$0")/.."
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
echo "torch==2.13.0" >"$pins"
.venv/bin/python -m piptools compile --quiet --all-extras --strip-extras --no-header --no-emit-options \
  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
  --constraint "$pins" --output-file requirements.lock "$@" pyproject.toml
sed -i "s|    #   -c .*|    #   scripts/lock.sh|; s|    # via -c .*|    # via scripts/lock.sh|" requirements.lock
