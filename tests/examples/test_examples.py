"""The scripts of examples/ run, check their own results, and stand in the table of examples/README.md."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forks import python
from second_proofs import proved_by

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed (pip install -e '.[train]')", allow_module_level=True)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
HELPER = "tiny.py"
SCRIPTS = sorted(script.name for script in FOLDER.glob("*.py") if script.name != HELPER)
LAUNCHED = "fsdp2.py"
MOST_LINES = 60
MOST_SECONDS = 300
PRINTED = {
    "accelerate_loop.py": r"loss 3\.\d+ -> [01]\.\d+ in 30 steps",
    "classify.py": r"accuracy (9\d|100)% of 128 texts",
    "custom_model.py": r"the gradients agree with F\.cross_entropy\nloss 3\.\d+ -> 0\.\d+",
    "embed.py": r"difference of a gradient is \de-0[5-9]\nloss \d\.\d+ -> \d\.\d+ in 20 steps",
    "fsdp2.py": r"holds 10320 of 20640 weights\nloss 3\.4\d+ \(one process: 3\.4\d+\) -> [01]\.",
    "hf_trainer.py": r"loss 3\.\d+ -> [12]\.\d+; largest difference from the unpatched run ",
    "keep_what_fits.py": r"equal bit for bit\nloss 3\.\d+ -> [01]\.\d+ in 10 steps (.*\n)+mean loss [01]\.",
    "medusa_heads.py": r"the same 12 tokens as greedy decoding, in \d forward passes instead of 12",
    "own_reward.py": r"reward: mean of 5 steps 0\.\d+ -> [01]\.\d+\nrewards/even_share/mean: mean of 5 steps 0\.",
    "own_loop.py": r"loss 3\.\d+ -> [01]\.\d+ in 30 steps",
    "patch_a_model.py": r"the gradients agree\nundone: every module has its own class again",
    "profile_a_recipe.py": r"the peak is \d+ MiB in loss\nthe largest part of it is logits with \d+ MiB",
    "rerank.py": r"the larger score in (9\d|100)% of 64 pairs",
    "trl_dpo.py": r"fused \['model', 'ref_model'\], not fused \{\}\nreward margin 0\.000 -> 0\.[1-9]",
    "trl_grpo.py": r"fused \['model'\], not fused \{\}\nmean reward of 5 steps 0\.\d+ -> [01]\.\d+",
    "trl_kto.py": r"fused \['model', 'ref_model'\], not fused \{\}\nreward of good answers .*, of bad answers -0",
    "trl_sft.py": r"fused \['model'\], not fused \{\}\nloss 3\.\d+ -> 2\.\d+",
    "vision_language.py": r"loss 5\.\d+ -> [0-2]\.\d+ in 40 steps",
}
"""Script -> what its last lines say when its own checks held."""
NEEDED = {name: "trl" for name in SCRIPTS if name.startswith("trl_")}
NEEDED |= dict.fromkeys(("embed.py", "rerank.py"), "sentence_transformers")
"""Script -> the package without which it is skipped."""
RUN_ALONE = [name for name in SCRIPTS if name != LAUNCHED]
TESTED_ELSEWHERE = ("trl_dpo.py", "trl_grpo.py", "trl_kto.py", "vision_language.py")
RUN_ALL = """
import contextlib, io, json, runpy, sys, traceback
results = {}
for script in sys.argv[1:]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(script, run_name="__main__")
            error = ""
        except BaseException:
            error = traceback.format_exc()
    results[script] = (error, out.getvalue())
print("RESULTS", json.dumps(results))
"""


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, tuple[str, str]]:
    """Script of this session's tests -> (its error, what it printed). They share one process."""
    missing = {name for name, package in NEEDED.items() if importlib.util.find_spec(package) is None}
    tested = {item.name.partition("[")[2].removesuffix("]") for item in request.session.items}
    scripts = [name for name in RUN_ALONE if name in tested and name not in missing]
    # `python FILE` puts the file's folder on the path. This copy of the process puts its working folder there.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        done = python(*scripts, code=RUN_ALL, cwd=FOLDER)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, tuple[str, str]] = json.loads(done.stdout.rpartition("RESULTS ")[2])
    assert found.keys() == {*scripts}
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "script",
    proved_by(
        lambda name: name not in TESTED_ELSEWHERE, RUN_ALONE, "test_trl_trainers.py and test_image_runs.py train so"
    ),
)
def test_example_runs_and_its_checks_hold(script: str, results: dict[str, tuple[str, str]]) -> None:
    if script not in results:
        pytest.skip(f"{NEEDED[script]} is not installed (pip install {NEEDED[script].replace('_', '-')})")
    error, printed = results[script]
    assert not error, error
    assert re.search(PRINTED[script], printed), printed[-1000:]


@pytest.mark.second_proof(
    "test_technique_runs.py trains with FSDP2 in two processes; two imports and a launcher take most of the time here"
)
def test_sharded_example_runs_on_two_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher = subprocess.Popen(
        [*command, str(FOLDER / LAUNCHED)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(), start_new_session=True,
    )  # fmt: skip
    try:
        out, err = launcher.communicate(timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)  # killing the launcher alone leaves its processes
        raise
    assert launcher.returncode == 0, err[-3000:]
    assert re.search(PRINTED[LAUNCHED], out), out


@pytest.mark.parametrize("script", [*SCRIPTS, HELPER])
def test_example_is_short_and_hides_no_module(script: str) -> None:
    """A script's folder is the first entry of the path, so profile.py there would hide Python's own."""
    assert script == HELPER or len((FOLDER / script).read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    assert importlib.util.find_spec(Path(script).stem) is None


def test_readme_lists_each_script_with_the_first_sentence_of_its_docstring() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| \[(\w+\.py)\]\(\1\) \| (.*) \|$", readme, re.MULTILINE))
    first = {}
    for script in SCRIPTS:
        text = ast.get_docstring(ast.parse((FOLDER / script).read_text(encoding="utf-8"))) or ""
        first[script] = re.match(r"[^\n]*?\.(?=\s|$)|[^\n]*", text)[0]  # type: ignore[index]
    assert {name: first[name].rstrip(".:") for name in SCRIPTS} == {k: v.rstrip(".") for k, v in listed.items()}
    assert PRINTED.keys() == {*SCRIPTS}
