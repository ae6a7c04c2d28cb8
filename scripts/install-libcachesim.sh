#!/usr/bin/env bash
# libcachesim, which the simulator is tested and timed against. It declares boto3, pybind11 and pytest as dependencies, of which
# nothing that we use of it needs any; boto3 alone takes pip minutes to resolve. So it comes without them, beside the lock file.
set -euo pipefail
"${1:-.venv/bin/python}" -m pip install --quiet --disable-pip-version-check --no-deps 'libcachesim==0.3.5'
