#!/bin/sh
# Install DeepSpeed into the virtual environment $1, whose processes the tests run without a GPU too; called by the
# Makefile. The demo does not need it, and the tests skip what is not there, so that a failure ends nothing.
# bitsandbytes and torchao stay out, for the time that their tests and what they compile take.
set -eu
venv=$1
if ! command -v c++ >/dev/null; then
    echo "no C++ compiler, which DeepSpeed needs when its processes meet: its tests are skipped"
elif "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --editable ".[deepspeed]"; then
    touch "$venv/.engines"
else
    echo "DeepSpeed is not installed: its tests are skipped"
fi
