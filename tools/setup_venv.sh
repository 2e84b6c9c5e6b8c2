#!/bin/sh
# Make the virtual environment $1 with everything the demo and the tests need; called by the Makefile.
# PYTHON names the interpreter to build it from. TORCH, TRITON and TRANSFORMERS name other releases than the default,
# for example `make test TORCH=2.8.0`. PRERELEASES=1 takes the newest of everything, pre-releases included.
set -eu
venv=$1
python=${PYTHON:-python3}
# For machines without torch: the release that the tests are written against. It runs on CPUs.
torch="torch==${TORCH:-2.13.0}"
# CPU builds of torch do not include Triton. The kernel tests are written against the interpreter of this release.
triton="triton==${TRITON:-3.6.0}"

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "tigon needs Python 3.10 or newer, and $python is $("$python" --version). Name another: make PYTHON=python3.12 ..." >&2
    exit 2
fi
options=
if "$python" -c 'import sys, torch; sys.exit(not (torch.version.cuda or torch.version.hip))' 2>/dev/null; then
    echo "using the GPU build of torch that $python has"
    options=--system-site-packages
fi
# shellcheck disable=SC2086
"$python" -m venv $options "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check --quiet"
# Install torch before any package that depends on it. As a dependency, pip would install the newest build it finds.
"$venv/bin/python" -c 'import torch' 2>/dev/null || $pip install "$torch"
if [ "$(uname -s)" = Linux ]; then
    "$venv/bin/python" -c 'import triton' 2>/dev/null || $pip install "$triton"
fi
$pip install --editable '.[train,dev]' ${TRANSFORMERS:+"transformers==$TRANSFORMERS"}
if [ -n "${PRERELEASES:-}" ]; then
    # Past tigon's own limits, with a warning.
    $pip install --pre --upgrade torch triton transformers accelerate peft trl tokenizers
fi
touch "$venv/.ready"
