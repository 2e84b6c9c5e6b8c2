#!/bin/sh
# Install DeepSpeed and kernels into the virtual environment $1. Called by the Makefile. The tests run DeepSpeed's
# processes on CPUs too. PRERELEASES=1 takes the newest, pre-releases included.
# The demo does not need them, and the tests skip missing packages, so a failed installation is no error.
# bitsandbytes and torchao are not installed, because their tests and compilation take long.
set -eu
venv=$1
pre=${PRERELEASES:+--pre}
# shellcheck disable=SC2086
install() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet install $pre "$@"; }
install --editable ".[hub-kernels]" || echo "kernels is not installed: its tests are skipped"
# transformers 5.8 wants kernels before 0.13 and cannot be imported beside a newer one.
if ! "$venv/bin/python" -c 'import transformers.integrations.hub_kernels' 2>/dev/null; then
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet uninstall -y kernels
    rm -rf "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kernels"  # files of the attempt
    echo "this transformers does not work with kernels 0.17: its tests are skipped"
fi
if ! command -v c++ >/dev/null; then
    echo "no C++ compiler, which DeepSpeed needs when its processes meet: its tests are skipped"
elif install --editable ".[deepspeed]"; then
    # The tests' processes meet through an operator that takes a minute to compile. conftest.py names its folder.
    PYTHONPATH=tests "$venv/bin/python" - <<'CODE' || echo "DeepSpeed's operator did not compile: tests will try again"
import os

import conftest
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

os.environ["CXX"] = conftest.COMPILER
ShareMemCommBuilder().load(verbose=False)
CODE
    touch "$venv/.engines"
else
    echo "DeepSpeed is not installed: its tests are skipped"
fi
