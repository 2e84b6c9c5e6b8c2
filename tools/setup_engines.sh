#!/bin/sh
# Install into the virtual environment $1 the packages of those techniques that the tests run without a GPU too; called
# by the Makefile. The demo needs none of them, and the tests skip what is not there, so that a failure ends nothing.
set -eu
venv=$1
engines=bnb,torchao
if command -v c++ >/dev/null; then
    engines=$engines,deepspeed # compiles an operator when its processes meet
else
    echo "no C++ compiler: the tests of DeepSpeed are skipped"
fi
if "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --editable ".[$engines]"; then
    touch "$venv/.engines"
else
    echo "not installed: $engines; their tests are skipped"
fi
