#!/bin/sh
# A training as a Ray job whose rollout actor, learner and driver are killed, submitted again, and compared with an undisturbed
# one, bit for bit. Writes runs/kill-and-resume.log; some minutes on two cores. What is given is passed on (--help).
set -eu
cd "$(dirname "$0")/.."
mkdir -p runs
rm -rf runs/kill-and-resume
.venv/bin/python -m experiments.packaging || exit 1
{ .venv/bin/python -m experiments.kill_and_resume "$@" || echo "exit code $?"; } | tee runs/kill-and-resume.log
! grep -q '^exit code' runs/kill-and-resume.log
