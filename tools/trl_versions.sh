#!/bin/sh
# The tests of tigon.integrations.trl with several releases of TRL; called by `make trl-versions`.
# $1 is the virtual environment; the other arguments are releases. Each is installed without its dependencies into a
# folder of its own, which Python finds before the environment's TRL, so the environment stays as it is.
set -eu
venv=$1
shift
failed=
for release in "$@"; do
    folder=$venv/trl-$release
    [ -d "$folder/trl" ] || "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps \
        --target "$folder" "trl==$release"
    echo "TRL $release"
    PYTHONPATH=$folder OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -q tests/integrations/test_trl_trainers.py \
        tests/integrations/test_trl_fuse.py tests/integrations/test_trl_unread_logits.py || failed="$failed $release"
done
[ -z "$failed" ] || { echo "failed with TRL$failed" >&2; exit 1; }
