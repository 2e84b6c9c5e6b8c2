"""A technique is one file and its fields in `Choices`: a made-up one reaches recipes, flags, search and pages."""

from __future__ import annotations

import shutil
from pathlib import Path

import forks
import tigon

pytestmark = forks.forks
PAGES = str(Path(__file__).parent)
"""The folder of technique_pages.py."""
FILE = '''
"""A made-up technique."""

from tigon.techniques.records.condition import Condition, Exclusion
from tigon.techniques.records.setting import Flag, Setting
from tigon.techniques.records.technique import Declaration, Technique

DECLARATION = Declaration(
    pages={"ring": "Ring attention"},
    settings=(
        Setting(
            field="ring_size", key="train.ring_size", help="Ranks of the ring.", minimum=1, maximum=8,
            flag=Flag(name="ring-size", help="How many ranks the ring has."), traced=True, search="run",
            candidates=lambda config: (1, 2),
            label=lambda choices: f"ring of {settings.ring_size}" if choices.ring_size > 1 else "",
        ),
    ),
    techniques=(
        Technique(
            name="ring", page="ring", saves="Made-up memory.", costs="Made-up time.", recipe={"train.ring_size": 2},
            chosen=(Condition("ring_size", "is at least", 2),), change_rank=9, source="made up",
        ),
    ),
    exclusions=(
        Exclusion(
            when=(Condition("ring_size", "is at least", 2), Condition("fsdp", "is", True)),
            reason="made-up reason", instead="train.ring_size: 1", source="made up",
        ),
    ),
)
'''
CHECKS = """
from pathlib import Path

import technique_pages
import typer.main
from tigon.cli import app
from tigon.planner.trace.key import _TRACE_FIELDS
from tigon.planner.gpus import find_gpu
from tigon.planner.render import as_recipe
from tigon.planner.request import Request
from tigon.planner.search import recommend, space
from tigon.models.loading.config import load_config
from tigon.objectives import recipe_checks
from tigon.recipe.keys import reference_table
from tigon.techniques import SEARCHED, TECHNIQUES
from tigon.techniques import matrix
from tigon.techniques.keys.settings import Settings

path = Path("recipe.yaml")
path.write_text("train: {steps: 1, ring_size: 2}")
choices = recipe_checks.load(path, gpu_present=lambda: False).choices()
assert choices.ring_size == 2 and "`train.ring_size`" in reference_table()

commands = typer.main.get_command(app._app()).commands
assert "--ring-size" in [option for parameter in commands["plan"].params for option in parameter.opts]

assert matrix.wrong_values(Choices(ring_size=9)) == ("ring_size is 9; it must be at most 8",)
(reason,) = matrix.refusals(Choices(ring_size=2, fsdp=True))
assert reason == "train.ring_size: 2 with sharding.fsdp: true: made-up reason; use train.ring_size: 1"

request = Request(model="tigon-demo", config=load_config("tigon-demo"), batch=1, seq=8, choices=Choices())
asked = space.SearchProblem(request=request, free=SEARCHED, gpu=find_gpu("24GiB"))
walks = space.walks(asked)
assert {walk.ring_size for walk in walks} == {1, 2} and walks[0].ring_size == 1
assert "ring_size" in _TRACE_FIELDS and "ring" in space.changes(choices)
assert "ring of 2" in recommend.label(choices)
tried = space.as_request(request, choices, 1)
assert as_recipe.keys(tried)["train.ring_size"] == 2

assert "[`ring`](ring.md)" in technique_pages.generated("README")
page = technique_pages.written("ring", Path("."))
assert page.startswith("# Ring attention") and "made-up reason" in page and "train: {ring_size: 2}" in page
print("reached")
"""


def copy_with_technique(folder: Path) -> Path:
    """A copy of the package with the made-up technique's file."""
    source = folder / "src"
    shutil.copytree(Path(tigon.__file__).parent, source / "tigon", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tigon" / "techniques" / "ring.py").write_text(FILE, encoding="utf-8")
    return source


def test_a_technique_in_one_file_reaches_recipe_flag_search_checks_and_pages(tmp_path: Path):
    source = copy_with_technique(tmp_path)
    with (source / "tigon" / "techniques" / "records" / "choices.py").open("a", encoding="utf-8") as settings:
        settings.write("    ring_size: int = 1\n")  # the class is the file's last
    done = forks.python(code=f"import sys; sys.path.append({PAGES!r})\n{CHECKS}", cwd=tmp_path, source=source)
    assert done.stdout.strip() == "reached", done.stderr[-2000:]


def test_a_setting_without_a_field_is_refused_on_import(tmp_path: Path):
    done = forks.python(code="import tigon.techniques", source=copy_with_technique(tmp_path))
    assert "ring_size: Choices lacks it" in done.stderr
