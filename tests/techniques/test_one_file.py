"""A technique is one file and its typed keys: a made-up one reaches recipes, `--set`, search and pages."""

from __future__ import annotations

import shutil
from pathlib import Path

import forks
import tigon

pytestmark = forks.forks
ROOT = str(Path(__file__).parents[2])
"""The folder of benchmarks/pages/techniques.py."""
FILE = '''
"""A made-up technique."""

from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.technique import Declaration, Search, Technique

DECLARATION = Declaration(
    searches=(Search(key="train.ring_size", how="run", candidates=lambda config: (1, 2)),),
    labels={"train.ring_size": "ring of {}"},
    techniques=(
        Technique(
            name="ring", recipe={"train.ring_size": 2}, effect_on_result="Made-up numbers.", change_rank=9,
            chosen=(Condition("train.ring_size", "is at least", 2),),
        ),
    ),
    exclusions=(
        Exclusion(
            when=(Condition("train.ring_size", "is at least", 2), Condition("sharding.fsdp", "is", True)),
            reason="made-up reason", instead="train.ring_size: 1", source="made up",
        ),
    ),
)
'''
CHECKS = """
from pathlib import Path

from benchmarks.pages import techniques as technique_pages
from tigon.cli.plan_request import Flags, problem_of
from tigon.errors import RecipeError
from tigon.planner.trace.cache.trace_key import _TRACED_OPTIONS
from tigon.planner.gpus import find_gpu
from tigon.planner.render import as_recipe
from tigon.planner.request import Request
from tigon.planner.search import recommend, space
from tigon.models.loading.config import load_config
from tigon.objectives import recipe_checks
from benchmarks.pages.recipe_keys import reference_table
from tigon.techniques import SEARCHES, TECHNIQUES
from tigon.techniques import matrix
from tigon.techniques.keys.settings import Settings

path = Path("recipe.yaml")
path.write_text("train: {steps: 1, ring_size: 2}")
settings = recipe_checks.load(path, gpu_present=lambda: False).settings()
assert settings.train.ring_size == 2 and "Ranks of the ring." in reference_table()

asked = problem_of(Flags(target="tigon-demo", gpu=find_gpu("24GiB"), assignments=("train.ring_size=2",)))
assert asked.request.settings.train.ring_size == 2 and "train.ring_size" not in asked.free

try:
    Settings.of({"train.ring_size": 9})
except RecipeError as error:
    assert str(error) == "train.ring_size is 9; it must be at least 1 and at most 8", error
else:
    raise AssertionError("9 was taken")
(reason,) = matrix.refusals(Settings.of({"train.ring_size": 2, "sharding.fsdp": True}))
assert reason == "train.ring_size: 2 with sharding.fsdp: true: made-up reason; use train.ring_size: 1"

request = Request(model="tigon-demo", config=load_config("tigon-demo"), batch=1, seq=8, settings=Settings.of({}))
asked = space.SearchProblem(request=request, free=frozenset(SEARCHES), gpu=find_gpu("24GiB"))
walks = space.walks(asked)
assert {walk.train.ring_size for walk in walks} == {1, 2} and walks[0].train.ring_size == 1
assert "train.ring_size" in _TRACED_OPTIONS and "ring" in space.changes(settings)
assert "ring of 2" in recommend.label(settings)
tried = space.as_request(request, settings, 1)
assert as_recipe.keys(tried)["train.ring_size"] == 2

words = "".join(f"- **{word}.** Made up.\\n" for word in technique_pages.WRITTEN)
text = f"# Ring\\n\\n{technique_pages.BEGIN}\\n## `ring`\\n\\n{words}{technique_pages.END}\\n"
page = technique_pages.generated("ring", {"ring": text})
assert "made-up reason" in page and "train: {ring_size: 2}" in page and "Made-up numbers." in page
print("reached")
"""


def copy_with_technique(folder: Path) -> Path:
    """A copy of the package with the made-up technique's file."""
    source = folder / "src"
    shutil.copytree(Path(tigon.__file__).parent, source / "tigon", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tigon" / "techniques" / "ring.py").write_text(FILE, encoding="utf-8")
    return source


def test_a_technique_in_one_file_reaches_recipe_set_search_checks_and_pages(tmp_path: Path):
    source = copy_with_technique(tmp_path)
    with (source / "tigon" / "techniques" / "keys" / "train.py").open("a", encoding="utf-8") as keys:
        keys.write('    ring_size: int = key(1, minimum=1, maximum=8, traced=True)\n    """Ranks of the ring."""\n')
    done = forks.python(code=f"import sys; sys.path.append({ROOT!r})\n{CHECKS}", cwd=tmp_path, source=source)
    assert done.stdout.strip() == "reached", done.stderr[-2000:]


def test_a_key_without_a_field_is_refused_on_import(tmp_path: Path):
    done = forks.python(code="import tigon.techniques", source=copy_with_technique(tmp_path))
    assert "train.ring_size: not a field in techniques/keys" in done.stderr
