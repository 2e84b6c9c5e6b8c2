#!/bin/sh
# Install DeepSpeed into the virtual environment $1. Called by the Makefile. The tests run its processes on CPUs too.
# The demo does not need DeepSpeed, and the tests skip missing packages, so a failed installation is no error.
# bitsandbytes and torchao are not installed, because their tests and compilation take long.
set -eu
venv=$1
if ! command -v c++ >/dev/null; then
    echo "no C++ compiler, which DeepSpeed needs when its processes meet: its tests are skipped"
elif "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --editable ".[deepspeed]"; then
    touch "$venv/.engines"
else
    echo "DeepSpeed is not installed: its tests are skipped"
fi
