"""What adding takes: the examples of CONTRIBUTING.md work in a copy of the package, and touch nothing else.

Each test writes the files of one section into a copy of `src/tigon`, and runs its checks in a fork that imports the
copy.
"""

from __future__ import annotations

import filecmp
import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("typer")

import forks
import tigon
from tests.docs.page_examples import ROOT, read_blocks, text_of

pytestmark = forks.forks
PAGE = "CONTRIBUTING.md"
TABLE_BEGINS = {
    "src/tigon/models/table.py": "_ROWS = (\n",
    "src/tigon/techniques/keys/train.py": "class TrainKeys(Section):\n",
}
"""Files with a table -> a line below which a row may stand."""


class Copy:
    """A copy of the package in `folder / src`, with the additions of one section of the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # with the compiled files, which stay valid because copies keep their times
        shutil.copytree(Path(tigon.__file__).parent, folder / "src" / "tigon")

    def add(self, heading: str) -> list[str]:
        """Carry out the section that begins with `heading`; returns the files that it changed or added."""
        section = text_of(PAGE).partition(f"### {heading}\n")[2]
        blocks = [block for block in read_blocks(PAGE, re.split(r"^##", section, flags=re.MULTILINE)[0]) if block.marks]
        for block in blocks:
            if path := block.mark("file"):
                target = self.folder / path
                assert not target.exists(), f"{path} exists already"
                target.write_text(block.body, encoding="utf-8")
            elif path := block.mark("row"):
                target, begin = self.folder / path, TABLE_BEGINS[path]
                before, found, after = target.read_text(encoding="utf-8").partition(begin)
                assert found and len(block.body.splitlines()) <= 2  # a key has its help below it
                row = textwrap.indent(block.body, "    ")
                target.write_text(f"{before}{begin}{row}{after}", encoding="utf-8")
        return self.changed()

    def changed(self) -> list[str]:
        files = [path for path in (self.folder / "src" / "tigon").rglob("*") if path.suffix not in ("", ".pyc")]
        names = [path.relative_to(self.folder) for path in files]
        return sorted(
            name.as_posix()
            for name in names
            if not (ROOT / name).exists() or not filecmp.cmp(ROOT / name, self.folder / name, shallow=False)
        )

    def run(self, *arguments: str, code: str | None = None, module: str | None = None, **environment: str) -> str:
        """What Python prints with this code or module, these arguments and the copy's tigon, in the folder."""
        done = forks.python(
            *arguments, code=code, module=module, cwd=self.folder, source=self.folder / "src",
            environment={"XDG_CACHE_HOME": str(self.folder / "cache"), **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def check(self, code: str, **environment: str) -> None:
        assert self.run(code=code + "\nprint('works')", **environment).strip() == "works"

    def tigon(self, *arguments: str) -> str:
        return self.run(*arguments, module="tigon")


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


OP = """
import torch
from tigon.ops import OPS, dispatch

op = OPS["squared_relu"]
assert list(OPS)[-3:] == ["squared_relu", "topk_sigmoid", "topk_softmax"]  # in alphabetical order
for dtype, most in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
    for case in (op.case,):
        x = op.make(case, dtype, torch.device("cpu"))["x"].requires_grad_()
        assert dispatch.uses_kernel(x) == (dtype == torch.float32)  # fp64 runs the reference
        wide = x.detach().double().requires_grad_()
        y, right = op.call(x), op.oracle(wide)
        dy = torch.randn_like(y)
        y.backward(dy)
        right.backward(dy.double())
        for got, wanted in ((y, right), (x.grad, wide.grad)):
            assert (got - wanted).norm() <= most * wanted.norm(), (case.id, dtype)
"""


def test_a_new_op_is_two_files(copy: Copy) -> None:
    """Its kernel runs through the interpreter, and both paths agree with the oracle, forward and backward."""
    pytest.importorskip("triton")
    assert copy.add("A new op: two files") == [
        "src/tigon/kernels/squared_relu.py", "src/tigon/ops/squared_relu.py",
    ]  # fmt: skip
    copy.check(OP, TRITON_INTERPRET="1")


def test_a_new_family_is_one_row(copy: Copy) -> None:
    table = "src/tigon/models/table.py"
    assert copy.add("A new model family: one row") == [table]
    lines = [(root / table).read_text(encoding="utf-8").splitlines() for root in (ROOT, copy.folder)]
    assert len(lines[1]) == len(lines[0]) + 1
    shown = copy.tigon("models", "seed_oss", "--verify")
    assert "seed_oss" in shown and "rms_norm" in shown


TECHNIQUE = """
from pathlib import Path
from tigon.errors import RecipeError
from tigon.objectives import recipe_checks
from tigon.recipe.keys import Recipe
from tigon.techniques import TECHNIQUES
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import RunInfo

def load(steps):
    Path("recipe.yaml").write_text(f"train: {{steps: 1, empty_cache_steps: {steps}}}")
    return recipe_checks.load(Path("recipe.yaml"), gpu_present=lambda: False)

settings, technique = load(5).settings(), TECHNIQUES["empty-cache"]
assert settings == Settings.of({"train.empty_cache_steps": 5}) and load(0).settings() == Settings.of({})
assert technique.used_by(settings) and not technique.used_by(Settings.of({}))
assert technique.arguments(settings, RunInfo()) == {"torch_empty_cache_steps": 5}
assert Recipe().train.empty_cache_steps == 0
try:
    load(2000)
except RecipeError as error:
    assert "train.empty_cache_steps" in str(error) and "1,000" in str(error), error
else:
    raise AssertionError("2000 was taken")
"""


def test_a_new_technique_is_one_file_and_a_field(copy: Copy) -> None:
    """tests/techniques/test_one_file.py follows one through the search, the exclusions and the pages."""
    assert copy.add("A new technique: one file and a field") == [
        "src/tigon/techniques/empty_cache.py", "src/tigon/techniques/keys/train.py",
    ]  # fmt: skip
    copy.check(TECHNIQUE)


RECIPE = """
model:
  name: tigon-demo
  config: {num_hidden_layers: 1, hidden_size: 32, intermediate_size: 64, num_attention_heads: 2,
           num_key_value_heads: 1, vocab_size: 512}
data: {source: text.txt, vocab_size: 300, sequence_length: 32, eval_fraction: 0}
train: {steps: 2, batch_size: 2, log_steps: 1, device: cpu, objective: embedding_penalty}
output: {save_model: false, sample_tokens: 0}
"""


def test_a_new_objective_is_one_file(copy: Copy) -> None:
    assert copy.add("A new training objective: one file") == ["src/tigon/objectives/embedding_penalty.py"]
    (copy.folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (copy.folder / "text.txt").write_text("\n".join(f"{i} squared is {i * i}." for i in range(500)), encoding="utf-8")
    copy.tigon("train", "recipe.yaml")
    lines = (copy.folder / "runs" / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    penalties = [record["embedding_penalty"] for record in map(json.loads, lines) if "embedding_penalty" in record]
    assert len(penalties) == 2 and penalties[0] > penalties[1] > 0


def test_a_new_command_is_one_file(copy: Copy) -> None:
    assert copy.add("A new command: one file") == ["src/tigon/cli/commands/gpus.py"]
    assert re.search(r"^ +gpus +List the names that `tigon plan --gpu` accepts", copy.tigon("--help"), re.MULTILINE)
    shown = copy.tigon("gpus", "--at-least", "100")
    assert "h200" in shown and "rtx-4090" not in shown
