#!/bin/sh
# Make the virtual environment $1 with the tools of the dependency group $2 of pyproject.toml; called by the Makefile.
set -eu
python=${PYTHON:-python3}
"$python" -m venv "$1"
pip="$1/bin/python -m pip --disable-pip-version-check --quiet"
$pip install --upgrade "pip>=25.1"  # the first that reads dependency groups
$pip install --group "$2"
