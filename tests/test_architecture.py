"""The folders are the architecture: imports point down, and what is promised about importing tigon holds."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import forks
import tigon
from tests.ops.cases import cases_of
from tigon import errors
from tigon.models import MODELS
from tigon.ops import OPS
from tigon.ops.dispatch import Primitive

SOURCE = Path(__file__).parent.parent / "src" / "tigon"
FILES = sorted(SOURCE.rglob("*.py"))

CONTRIBUTING = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
"""It documents the order of the packages and the reasons for imports inside functions."""


def documented_order() -> tuple[tuple[str, ...], ...]:
    """The packages from top to bottom. A package may import those of later entries, never one of its own entry."""
    (line,) = re.findall(r"^`(\w.* -> .*)`$", CONTRIBUTING, re.MULTILINE)
    return (("__main__",), *(tuple(entry.split(" | ")) for entry in line.split(" -> ")))


def documented_late_packages() -> set[str]:
    """The packages and modules that may be imported inside functions."""
    rows = CONTRIBUTING.partition("| import inside a function | reason |\n|---|---|\n")[2].partition("\n\n")[0]
    return {name for row in rows.splitlines() for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}


LEVEL = {room: level for level, entry in enumerate(documented_order()) for room in entry}
LATE = documented_late_packages()
# Every package may import these. They import no package of tigon.
LEAVES = {"errors", "_files", "_install", "_quiet", "_trunk", "units"}
MAY_IMPORT_TRANSFORMERS = {
    "cli", "doctor", "models", "techniques", "objectives", "medusa", "data", "planner", "trainer", "sweep", "bench",
    "compat", "integrations", "trained", "callback", "_quiet",
}  # fmt: skip
# What may say "Medusa" or ask for its heads: the objective, its modules, its command, and the room that decodes with
# heads after a run. recipe/keys.py declares the section.
MAY_NAME_HEADS = {"objectives", "medusa", "cli", "trained"}
MAX_LINES = 600
MAX_FILES = 16
ONE_FILE_PER_OP = {"ops", "kernels"}


def module_of(path: Path) -> str:
    return ".".join(("tigon", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


TEXT = {path: path.read_text(encoding="utf-8") for path in FILES}


@functools.cache
def tree_of(text: str) -> ast.Module:
    """The tree of a file, parsed once for all rules."""
    return ast.parse(text)


@functools.cache
def imports(path: Path, *, module_level: bool = False) -> frozenset[str]:
    """Dotted names a file imports, `from x import y` as "x.y"; only those that run at import if `module_level`.

    A string that names a module of tigon alone, or one of its functions, counts as an import of the module: a registry
    or `importlib.import_module` imports it.
    """
    tree = tree_of(path.read_text(encoding="utf-8"))
    nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    if module_level:
        nodes = list(imports_at_import(tree.body))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: imports are absolute"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    if not module_level:
        names |= modules_in_strings(tree)
    return frozenset(names)


def imports_at_import(statements: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements that run when a file is imported: outside of functions, and not for types alone."""
    for node in statements:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.expr)):
            continue
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            yield from imports_at_import(ast.iter_child_nodes(node))


def modules_in_strings(tree: ast.AST) -> set[str]:
    """Modules of tigon that a string names, as `tigon.kernels.norm` or `tigon.kernels.norm:norm_fwd`."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text.partition(":")[0] for text in texts if re.fullmatch(r"tigon(\.\w+)+(:\w+)?", text)} & MODULES.keys()


def rooms_imported(path: Path) -> set[str]:
    rooms = {name.split(".")[1] for name in imports(path) if name.startswith("tigon.")}
    return {r for r in rooms if r in LEVEL or r in LEAVES or (SOURCE / r).exists() or (SOURCE / f"{r}.py").exists()}


def test_imports_point_down() -> None:
    for path in FILES:
        room = room_of(path)
        if room == "__init__":
            assert not rooms_imported(path) & {"cli", "trainer", "bench", "compat"}
            continue
        for other in rooms_imported(path) - LEAVES - {room}:
            assert room not in LEAVES, f"{path}: {room} is a leaf, but imports {other}"
            assert other in LEVEL, f"{path}: {other} has no place in the order of CONTRIBUTING.md"
            assert LEVEL[other] > LEVEL[room], f"{path}: {room} imports {other}"


def test_every_package_has_its_place_in_the_documented_order() -> None:
    assert {room_of(path) for path in FILES} == LEVEL.keys() | LEAVES | {"__init__"}


def files_imported(path: Path) -> set[str]:
    """The modules of tigon that a file imports, in functions, for types and by their names too."""
    return {name if name in MODULES else name.rpartition(".")[0] for name in imports(path)} & MODULES.keys()


def in_a_circle(imported: Mapping[str, set[str]]) -> set[str]:
    """The files that import each other in a circle, and those above one."""
    left = dict(imported)
    while free := {name for name, below in left.items() if not below & left.keys()}:
        left = {name: below for name, below in left.items() if name not in free}
    return set(left)


def test_no_files_import_each_other_in_a_circle() -> None:
    """In a package or across packages."""
    assert not in_a_circle({name: files_imported(path) - {name} for name, path in MODULES.items()})


@pytest.mark.parametrize(
    "line",
    [
        "from tigon.trainer import run", "import tigon.trainer.run",
        "def f():\n    from tigon.trainer.run import train",
        "if TYPE_CHECKING:\n    from tigon.trainer.run import train", 'import_module("tigon.trainer.run")',
    ],
)  # fmt: skip
def test_a_circle_of_two_files_is_found(line: str, tmp_path: Path) -> None:
    """trainer/run.py imports trainer/prepare.py; the line stands in prepare.py."""
    (lower := tmp_path / "prepare.py").write_text(line, encoding="utf-8")
    circle = {"tigon.trainer.run": {"tigon.trainer.prepare"}, "tigon.trainer.prepare": files_imported(lower)}
    assert in_a_circle(circle) == circle.keys()
    assert not in_a_circle({**circle, "tigon.trainer.prepare": set()})


# --- imports inside functions ----------------------------------------------------------------------------------------


def late_package(name: str) -> str | None:
    """The entry of the documented table that a dotted name belongs to."""
    return next((entry for entry in LATE if name == entry or name.startswith(f"{entry}.")), None)


@functools.cache
def loaded_by(module: str) -> frozenset[str]:
    """The entries of the table that are imported with a module of tigon, its packages and what they import."""
    seen: set[str] = set()
    found: set[str] = set()
    waiting = {module}
    while waiting:
        name = waiting.pop()
        name = name if name in MODULES else name.rpartition(".")[0] if name.startswith("tigon.") else name
        if name in seen:
            continue
        seen.add(name)
        if entry := late_package(name):
            found.add(entry)
        if name in MODULES:
            waiting |= imports(MODULES[name], module_level=True)
            waiting |= {name.rpartition(".")[0]} - {""}
    return frozenset(found)


def imports_in_functions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, dotted name, comment) of each import inside a function."""
    lines = text.splitlines()
    functions = [n for n in ast.walk(tree_of(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {node for function in functions for node in ast.walk(function)}
    for node in inside:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            comment = lines[(node.end_lineno or 1) - 1].partition("#")[2].strip()
            parent = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((node.lineno, f"{parent}{alias.name}", comment) for alias in node.names)


def without_reason(text: str, module: str) -> list[str]:
    """The imports inside functions that have none of the documented reasons."""
    wrong = []
    for line, name, comment in imports_in_functions(text):
        if late_package(name):
            continue
        where = f"{module}:{line} {name}"
        if named := re.search(r"\bloads (\S+)$", comment):
            if not name.startswith("tigon.") or named[1] not in loaded_by(name) - loaded_by(module):
                wrong.append(f"{where} does not load {named[1]}, or the file has loaded it")
        elif not (comment.endswith("not for --help") and module.startswith("tigon.cli.")):
            wrong.append(f"{where} gives no reason")
    return wrong


def test_every_import_inside_a_function_has_a_documented_reason() -> None:
    assert not [wrong for path in FILES for wrong in without_reason(TEXT[path], module_of(path))]


@pytest.mark.parametrize(
    ("line", "is_allowed"),
    {
        "import transformers": True,
        "from torch.distributed import launcher": True,
        "from tigon.trainer import guarded  # loads transformers": True,
        "import json": False,
        "from torch import nn": False,
        "from tigon.trainer import guarded": False,
        "from tigon.trainer import guarded  # loads matplotlib": False,
        "from tigon import units  # loads transformers": False,
        "from tigon import units  # not for --help": False,
    }.items(),
)
def test_an_import_inside_a_function_without_a_reason_is_found(line: str, is_allowed: bool) -> None:
    assert bool(without_reason(f"def f():\n    {line}\n", "tigon.trainer.run")) != is_allowed


def test_every_documented_reason_is_needed() -> None:
    used = {late_package(name) for text in TEXT.values() for _, name, _ in imports_in_functions(text)}
    assert used - {None} == LATE


# --- private names ---------------------------------------------------------------------------------------------------


def names_bound_by_imports(tree: ast.AST) -> dict[str, str]:
    """Name in a file -> the dotted name that an import statement gave it."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return bound


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names_of_others(text: str, room: str) -> list[str]:
    """The private names of other packages of tigon that a file imports, reads as an attribute, or names in a string.

    A string counts behind its module: `setattr(module, "_name", ...)`, `(module, "_name")`.
    """
    tree = tree_of(text)
    imported = names_bound_by_imports(tree)
    for node in ast.walk(tree):  # X = importlib.import_module("tigon.ops.rope")
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call) and node.value.args:
            full = getattr(node.value.args[0], "value", None)
            if isinstance(full, str) and ast.unparse(node.value.func).endswith("import_module"):
                imported[ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])] = full
    parts = {name: full.split(".") for name, full in imported.items() if full.startswith("tigon.")}
    others = {name: path for name, path in parts.items() if path[1] != room}
    found = [".".join(path) for path in others.values() if any(map(is_private, path[1 + (path[1] in LEAVES) :]))]
    for node in ast.walk(tree):
        pair = node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else []
        name = pair[1].value if len(pair) > 1 and isinstance(pair[1], ast.Constant) else None
        if isinstance(name, str) and is_private(name) and ast.unparse(pair[0]) in others:
            found.append(f"{ast.unparse(pair[0])}, {name!r}")
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner in others or (owner.partition(".")[0] in others and owner.startswith("tigon.")):
                found.append(f"{owner}.{node.attr}")
    return found


def test_no_package_uses_a_private_name_of_another() -> None:
    found = {str(path): private_names_of_others(text, room_of(path)) for path, text in TEXT.items()}
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    "text",
    [
        "from tigon.ops._op import Case", "from tigon.ops import _op", "from tigon.ops.rope import _check",
        "import tigon.ops._op", "from tigon.ops import rope\nrope._check()", "import tigon.ops\ntigon.ops._op",
        "import tigon.ops.rope as r\nr._check()", "def f():\n    from tigon.ops.rope import _check",
        "import importlib\nR = importlib.import_module('tigon.ops.rope')\nR._check()",
        "R: Any = import_module('tigon.ops.rope')\nreplaced = {(R, '_check'): 1}",
        "from tigon.ops import rope\nsetattr(rope, '_check', None)",
    ],
)  # fmt: skip
def test_a_private_name_of_another_package_is_found(text: str) -> None:
    assert private_names_of_others(text, "models") and not private_names_of_others(text, "ops")
    assert not private_names_of_others("from tigon._files import one_line\nself._x", "models")
    assert private_names_of_others("from tigon._files import _write", "models")


# --- private names and attributes of libraries -----------------------------------------------------------------------


def documented_names(heading: str) -> set[str]:
    """The names in the first column of a table of CONTRIBUTING.md."""
    rows = CONTRIBUTING.partition(f"| {heading} | reason why no public one serves |\n|---|---|\n")[2]
    return {
        name for row in rows.partition("\n\n")[0].splitlines() for name in re.findall(r"`([\w.]+)`", row.split("|")[1])
    }


def private_imports(text: str) -> set[str]:
    """The private names that a file imports from other libraries."""
    names = names_bound_by_imports(tree_of(text)).values()
    return {name for name in names if is_private(name) and not name.startswith("tigon.")}


def within(name: str, entries: Iterable[str]) -> str | None:
    """The entry that a dotted name is, or stands below."""
    return next((entry for entry in entries if name == entry or name.startswith(f"{entry}.")), None)


def test_private_names_of_libraries_are_imported_only_for_a_documented_reason() -> None:
    imported = set().union(*(private_imports(text) for text in TEXT.values()))
    documented = documented_names("imported private name")
    assert {name for name in imported if not within(name, documented)} == set()
    assert {within(name, documented) for name in imported} == documented


def attributes_set_from_outside(text: str) -> list[str]:
    """The attributes of imported modules, classes and objects that a file sets."""
    tree = tree_of(text)
    bound = names_bound_by_imports(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            pairs = [(target.value, target.attr) for target in targets if isinstance(target, ast.Attribute)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            pairs = [(node.args[0], ast.unparse(node.args[1]).strip("'"))]
        else:
            continue
        for owner, name in pairs:
            first, *rest = ast.unparse(owner).split(".")
            if first in bound:
                found.append(".".join((bound[first], *rest, name)))
            elif re.match(r"(sys\.modules|(importlib\.)?import_module)\b", ast.unparse(owner)):
                found.append(f"{ast.unparse(owner)}.{name}")
    return [name for name in found if not name.startswith("sys.") or name.startswith("sys.modules")]


def test_no_file_sets_an_attribute_of_what_it_imports() -> None:
    documented = documented_names("imported private name") | documented_names("overridden private method")
    found = [(str(path), name) for path, text in TEXT.items() for name in attributes_set_from_outside(text)]
    assert not [
        where
        for where in found
        if not within(where[1], documented) and ".".join(where[1].split(".")[-2:]) not in documented
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    {
        "import torch\ntorch.nn.functional.cross_entropy = f": ["torch.nn.functional.cross_entropy"],
        "from torch import nn\nsetattr(nn.Linear, 'forward', f)": ["torch.nn.Linear.forward"],
        "import sys\nsetattr(sys.modules['x'], name, f)": ["sys.modules['x'].name"],
        "from tigon.ops import rope\nrope.LIMIT += 1": ["tigon.ops.rope.LIMIT"],
        "import sys\nsys.stdout = stream": [],
        "self.limit = 1\nsetattr(module, name, f)": [],
    }.items(),
)
def test_an_attribute_that_is_set_from_outside_is_found(text: str, found: list[str]) -> None:
    assert attributes_set_from_outside(text) == found


def overridden_private_methods(text: str) -> set[str]:
    """`Class.method` of the private methods of other libraries' classes that a file defines anew.

    A function that is assigned to a private name of another object counts as `method` alone.
    """
    tree = tree_of(text)
    bound = names_bound_by_imports(tree)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            own = {item.name for item in node.body if isinstance(item, ast.FunctionDef) and is_private(item.name)}
            for base in filter(None, (class_of_another_library(base, bound) for base in node.bases)):
                found |= {f"{owner_of(base, name)}.{name}" for name in own if hasattr(base, name)}
        elif isinstance(node, ast.Assign):
            is_function = isinstance(node.value, ast.Lambda) or ast.unparse(node.value) in functions
            targets = [target for target in node.targets if isinstance(target, ast.Attribute)]
            names = [target.attr for target in targets if ast.unparse(target.value) != "self"]
            found |= {name for name in names if is_function and is_private(name)}
    return found


def class_of_another_library(base: ast.expr, bound: Mapping[str, str]) -> type | None:
    first, *rest = ast.unparse(base).partition("[")[0].split(".")
    package, *path = [*bound.get(first, first).split("."), *rest]
    if first not in bound or package in ("tigon", *sys.stdlib_module_names) or not path:
        return None
    try:
        found = importlib.import_module(".".join((package, *path[:-1])))
    except ImportError:  # an optional package, such as axolotl
        return None
    return getattr(found, path[-1])  # type: ignore[no-any-return]


def owner_of(base: type, name: str) -> str:
    """The class that introduced a method."""
    return next(cls.__name__ for cls in reversed(base.__mro__) if name in vars(cls))


def test_private_methods_of_libraries_are_overridden_only_for_a_documented_reason() -> None:
    pytest.importorskip("transformers")
    found = set().union(*(overridden_private_methods(text) for text in TEXT.values()))
    documented = documented_names("overridden private method")
    whole = {name for name in documented if name.rpartition(".")[2] not in found}
    assert {name for name in found if "." in name} == whole
    assert {name for name in found if "." not in name} <= {name.rpartition(".")[2] for name in documented}
    assert len([name for name in documented if name.startswith("Trainer.")]) <= 3


def test_tigon_has_one_subclass_of_the_trainer() -> None:
    found = [
        (room_of(path), node.name)
        for path, text in TEXT.items()
        for node in ast.walk(tree_of(text))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Trainer") for base in node.bases)
    ]
    assert found == [("trainer", "GuardedTrainer")]


@pytest.mark.parametrize(
    ("text", "found"),
    {
        "from transformers import Trainer\nclass T(Trainer):\n    def _evaluate(self): ...": {"Trainer._evaluate"},
        "import transformers\nclass T(transformers.Trainer):\n    def _wrap_model(self): ...": {"Trainer._wrap_model"},
        "from transformers import Trainer\nclass T(Trainer):\n    def evaluate(self): ...": set(),
        "from transformers import Trainer\nclass T(Trainer):\n    def _own(self): ...": set(),
        "def set_dtype(): ...\nother.Init._set_dtype = set_dtype": {"_set_dtype"},
        "self.accelerator._prepare = lambda *given: given": {"_prepare"},
        "self._step = 1": set(),
    }.items(),
)
def test_an_overridden_private_method_is_found(text: str, found: set[str]) -> None:
    pytest.importorskip("transformers")
    assert overridden_private_methods(text) == found


# --- libraries, sizes and names --------------------------------------------------------------------------------------


def test_packages_import_only_their_allowed_libraries() -> None:
    for path in FILES:
        room, names = room_of(path), imports(path)
        roots = {name.split(".")[0] for name in names}
        if room == "kernels":
            allowed = sys.stdlib_module_names | {"torch", "triton", "tigon", "__future__"}
            assert roots <= allowed, f"{path} imports {roots - allowed}"
        if room == "ops":
            allowed = sys.stdlib_module_names | {"torch", "tigon", "__future__"}
            assert roots <= allowed, f"{path} imports {roots - allowed}"
            # Triton comes with the first launch; these two are torch only.
            at_import = {n for n in imports(path, module_level=True) if n.startswith("tigon.kernels")}
            without_triton = ("tigon.kernels.layout", "tigon.kernels.chips")
            assert all(n in without_triton or n.startswith(without_triton) for n in at_import), f"{path}: {at_import}"
        if "transformers" in roots:
            assert room in MAY_IMPORT_TRANSFORMERS, path
        if "markupsafe" in roots:  # it exempts text from escaping
            assert room == "report", path


def test_every_file_is_below_the_line_limit() -> None:
    lines = {str(path): len(text.splitlines()) for path, text in TEXT.items()}
    assert not {path: number for path, number in lines.items() if number > MAX_LINES}, "split them"


def test_every_folder_is_below_the_limit_of_files() -> None:
    numbers = Counter(path.parent.relative_to(SOURCE).as_posix() for path in FILES if path.name != "__init__.py")
    crowded = {folder: number for folder, number in numbers.items() if number > MAX_FILES}
    assert crowded.keys() <= ONE_FILE_PER_OP, "give the files of one job a folder"


def names_of_medusa(text: str) -> list[str]:
    """The names in code that mean Medusa or a recipe's section `heads`; attention has heads too, as variables."""
    found = []
    for node in ast.walk(tree_of(text)):
        if isinstance(node, (ast.Attribute, ast.keyword)):
            name = (node.attr if isinstance(node, ast.Attribute) else node.arg) or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            name = node.value
        else:
            name = getattr(node, "id", getattr(node, "name", None)) or ""
            name = "" if name == "heads" else name
        if re.search(r"(?i)medusa|^heads(\.|$)|HeadsConfig|draft_heads", name):
            found.append(f"line {getattr(node, 'lineno', '?')}: {name}")
    return found


@pytest.mark.parametrize("text", ["from tigon import medusa", "recipe.heads", "f(heads=1)", "f('heads.stage')"])
def test_a_name_of_medusa_is_found(text: str) -> None:
    assert names_of_medusa(text) and not names_of_medusa("heads, key_heads = config.num_attention_heads, 'two heads'")


def test_only_the_objective_asks_for_medusa_heads() -> None:
    """A decision about heads is the objective's; the trainer, the planner and the sweep ask its protocol."""
    # A kernel, an op or a model may have heads: attention's, or several output layers.
    may = {*MAY_NAME_HEADS, "bench", "compat"}
    asked = [path for path in FILES if LEVEL.get(room_of(path), 0) < LEVEL["models"] and room_of(path) not in may]
    asked += sorted((SOURCE / "techniques").rglob("*.py"))
    found = {str(path): names_of_medusa(TEXT[path]) for path in asked if path != SOURCE / "recipe" / "keys.py"}
    assert not {path: names for path, names in found.items() if names}


def test_no_recipe_key_is_declared_twice() -> None:
    pytest.importorskip("pydantic")
    from tigon.recipe.keys import SECTIONS

    for section, form in SECTIONS.items():
        declared = [name for part in form.__mro__ for name in inspect.get_annotations(part)]
        assert sorted(declared) == sorted({*declared}), section


def test_recipes_are_loaded_with_the_objectives_rules() -> None:
    """`recipe_file.load` does not know them; `objectives.recipe_checks.load` passes them on."""
    for path in FILES:
        if room_of(path) not in ("objectives", "recipe"):
            assert not {"tigon.recipe.recipe_file", "tigon.recipe.recipe_file.load"} & imports(path), path


def test_importing_tigon_imports_neither_transformers_nor_triton() -> None:
    code = (
        "import sys, tigon, tigon.models, tigon.nn\n"
        "print(sorted({'transformers', 'triton', 'peft', 'typer', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@forks.forks
def test_every_op_works_without_triton() -> None:
    """macOS and Windows: every op runs its PyTorch path."""
    code = """
import sys
sys.modules["triton"] = None  # import triton now raises ImportError
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else real(name, *a)
import torch, tigon
from tigon.ops import OPS
from tigon.ops.dispatch import Differentiable, Primitive
assert not tigon.ops.dispatch.HAS_TRITON
for op in OPS.values():
    inputs = op.make(op.case, torch.float32, torch.device("cpu"))
    for name in op.grads:
        if isinstance(inputs.get(name), torch.Tensor):
            inputs[name].requires_grad_()
    out = op.call(**inputs)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
print("ok")
"""
    done = forks.python(code=code, source=SOURCE.parent)
    assert done.stdout.strip() == "ok", done.stderr[-2000:]


def test_error_tree_in_the_docstring_is_current() -> None:
    """The tree drawn at the top of errors.py, by indentation, is the one the classes form."""
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^( +)(?:[x+·-] )?([A-Z]\w+)", line)
        if not match:
            continue
        depth = (len(match[1]) - 4) // 2
        above = [*above[:depth], match[2]]
        drawn[match[2]] = above[-2] if depth else "Exception"
    actual = {
        name: next(base.__name__ for base in cls.__mro__[1:] if base.__name__ in vars(errors) or base is Exception)
        for name, cls in vars(errors).items()
        if isinstance(cls, type)
    }
    assert drawn == actual


def test_engine_compares_with_no_model_name() -> None:
    """A family is a row of models/table.py; comparing with a name anywhere else is a branch that should be a field."""
    names = set(MODELS)
    assert names
    for path in sorted((SOURCE / "models").rglob("*.py")):
        if path.name == "table.py":
            continue
        asked: set[object] = set()
        for node in ast.walk(tree_of(TEXT[path])):
            if isinstance(node, (ast.Compare, ast.MatchValue)):
                asked.update(n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
            elif isinstance(node, ast.Dict):
                asked.update(key.value for key in node.keys if isinstance(key, ast.Constant))
        assert not names & asked, path.name


def errors_raised_by(value: object, seen: set[object] | None = None) -> set[str]:
    """Names of tigon's errors in the `raise` statements of a function, and of the code of tigon.ops that it refers to.

    A primitive stands for its check and its composite.
    """
    seen = set() if seen is None else seen
    if isinstance(value, Primitive):
        return errors_raised_by(value._check, seen) | errors_raised_by(value._composite, seen)
    code = inspect.isfunction(value) or inspect.isclass(value)
    if not code or value in seen or not value.__module__.startswith("tigon.ops"):
        return set()
    seen.add(value)
    module = vars(sys.modules[value.__module__])
    found: set[str] = set()
    for cell in getattr(value, "__closure__", None) or ():  # a decorated function
        found |= errors_raised_by(cell.cell_contents, seen)
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(value)))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            found |= {node.exc.func.id} & vars(errors).keys()
        elif isinstance(node, ast.Name):
            found |= errors_raised_by(module.get(node.id), seen)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= errors_raised_by(getattr(module.get(node.value.id), node.attr, None), seen)
    return found


@pytest.mark.parametrize("name", OPS)
def test_docstring_of_every_op_lists_each_error_that_it_raises(name: str) -> None:
    function = getattr(tigon, name)
    raises = (inspect.getdoc(function) or "").partition("\nRaises:\n")[2]
    listed = {word for line in re.findall(r"^    ([\w, ]+):", raises, flags=re.M) for word in line.split(", ")}
    assert listed == errors_raised_by(function) > {"DoubleBackwardError"}


def test_every_op_has_cases_of_distinct_names_and_tensors_to_differentiate() -> None:
    for op in OPS.values():
        assert op.grads
        for case in cases_of(op):
            assert case.id == case.id.lower() and " " not in case.id
        assert len({c.id for c in cases_of(op)}) == len(cases_of(op)), f"{op.name} has two cases of one name"
