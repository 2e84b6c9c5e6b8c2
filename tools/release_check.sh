#!/bin/sh
# Build the sdist and the wheel, check both, and use the wheel in fresh environments: with torch alone, with pydantic, with
# the packages of [train], then one environment for every other extra, in which `tigon train` runs what needs the extra.
# Called by `make release-check`; $1 is the folder for the environments.
set -eu
folder=$1
python=${PYTHON:-python3}
torch="torch==${TORCH:-2.13.0}"
root=$(pwd)
step() { echo "release-check: $*"; }
fail() { echo "release-check: $*" >&2; exit 1; }

rm -rf dist "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
sh tools/setup_tools.sh "$folder/tools" release
tools=$folder/tools/bin

step "build the sdist, and the wheel from the sdist"
"$tools/python" -m build >"$folder/build.log" 2>&1 || { cat "$folder/build.log" >&2; fail "python -m build failed"; }
"$tools/twine" check --strict dist/*
"$tools/check-wheel-contents" dist/*.whl
wheel=$(echo "$root"/dist/*.whl)
version=$(basename "$wheel" | cut -d- -f2)

step "install the wheel beside torch, without triton and every other dependency"
"$python" -m venv "$folder/fresh"
fresh=$folder/fresh/bin
pip="$fresh/python -m pip --disable-pip-version-check --quiet"
$pip install "$torch"  # as tools/setup_venv.sh
$pip uninstall --yes triton  # builds of torch for GPUs bring it
$pip install --no-deps "$wheel"
cd "$folder"  # away from the checkout, whose src/ must not be imported
"$fresh/python" -c '
import sys
import torch
import tigon
assert "site-packages" in tigon.__file__, tigon.__file__
hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
tigon.linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 3, 4])).backward()
assert hidden.grad is not None and weight.grad is not None
assert not {"transformers", "triton"} & set(sys.modules)
print("imported with torch", torch.__version__, "alone, and ran one op")
'

step "tigon with pydantic, which its wheel requires, and without its command line's packages"
$pip install pydantic
test "$("$fresh/tigon" --version)" = "tigon $version" || fail "tigon --version does not print tigon $version"
status=0
"$fresh/tigon" train recipe.yaml 2>stderr || status=$?
cat stderr
test "$status" = 2 || fail "tigon train exits with $status, not 2"
# Without numpy, torch warns when it is imported. The warning has two lines.
test "$(grep -vc 'NumPy\|_conversion_method_template' stderr)" = 1 || fail "tigon train prints more than one line"

step "run the install command of that line"
command=$(sed -n "s/.*run pip install //p" stderr)
eval "$pip install $command"
"$fresh/tigon" --version
"$fresh/tigon" doctor
"$fresh/python" "$root/examples/hf_trainer.py"

step "a typed program against the installed wheel"
"$tools/mypy" --strict --config-file= --python-executable "$fresh/python" "$root/tests/release/typed_client.py"
echo '{"typeCheckingMode": "strict"}' >pyrightconfig.json
cp "$root/tests/release/typed_client.py" .
"$tools/basedpyright" --pythonpath "$fresh/python" typed_client.py

# train EXTRA RECIPE [--set KEY=VALUE ...]: two steps of a recipe of the checkout, by the wheel of the extra's environment.
train() {
    extra=$1; recipe=$2; shift 2
    "$folder/$extra/bin/tigon" train "$root/recipes/$recipe" --set train.steps=2 --set output.folder="$folder/runs" "$@" \
        >"$folder/$extra.log" 2>&1 || { tail -n 20 "$folder/$extra.log" >&2; fail "[$extra] cannot train $recipe"; }
}
for extra in deepspeed bnb torchao trl; do
    step "install [train,$extra] into a separate environment, and train with it"
    "$python" -m venv "$folder/$extra"
    pip="$folder/$extra/bin/python -m pip --disable-pip-version-check --quiet"
    $pip install "$torch"
    $pip install "$wheel[train,$extra]"
    $pip check
    case $extra in
        deepspeed) train deepspeed techniques/zero-2.yaml --set sharding.gpus=1 ;;  # on a CPU ZeRO has one process
        bnb) train bnb techniques/qlora.yaml ;;
        torchao) train torchao techniques/adamw-torchao-8bit.yaml ;;
        trl) train trl objectives/dpo.yaml --set post_training.base_steps=2 --set train.warmup_steps=0 ;;
    esac
done
# To be committed in benchmarks/installs, for docs/support.md.
"$fresh/python" "$root/tools/installed_versions.py" \
    "$folder/deepspeed" "$folder/bnb" "$folder/torchao" "$folder/trl" >installed.json
step "tigon $version can be released; $folder/installed.json says with what it was used"
