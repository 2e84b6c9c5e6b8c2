"""Forks of this process. A fork needs no imports, which take most of the time of a test process.

Changes that a fork makes to itself end with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from tigon.trainer.distributed import launch

TESTS = Path(__file__).parent

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="works with forked copies of this process")


def need_deepspeed() -> None:
    """Skip the test without DeepSpeed. Otherwise import what `deepspeed.initialize` would import in each fork.

    Its file for Muon loads Inductor, which takes 4 CPU seconds.
    """
    pytest.importorskip("deepspeed")
    for name in ("deepspeed.runtime.zero.muon.muon_optimizer", "torch.utils.cpp_extension"):
        with contextlib.suppress(ImportError):  # another version of DeepSpeed, or no setuptools
            importlib.import_module(name)


def in_forks(
    action: Callable[[int], Any], count: int = 1, *, said: Path | None = None, printed: Path | None = None,
    fresh: bool = True,
) -> list[int]:  # fmt: skip
    """Run `action(rank)` in copies of this process at once, and give their wait statuses.

    With more than one, the forks find each other as the ranks of a launcher do. said, printed: the files for their
    stderr and stdout, which are dropped by default. fresh: without Accelerate's state of this process, which a
    trainer made before needs.
    """
    if torch.cuda.is_initialized():
        pytest.skip("a copy of a process that has used a GPU cannot run a backward pass; run these alone")
    assert not torch.distributed.is_initialized(), "the copies would take this process's group for theirs, and wait"
    with launch.reserved_address() as meeting:
        return _in_forks(action, count, meeting, said=said, printed=printed, fresh=fresh)


def end_with(action: Callable[[], Any]) -> NoReturn:
    """Run `action` in this copy of the process, and end it with the result if that is a number, else with 0."""
    code = 1
    try:
        result = action()
        code = result if isinstance(result, int) else 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _as_rank(
    action: Callable[[int], Any], rank: int, count: int, meeting: dict[str, str], *, said: Path | None,
    printed: Path | None, fresh: bool,
) -> Any:  # fmt: skip
    gc.freeze()  # to collect what the parent has dropped, a process group, may be to wait for its threads
    torch.set_num_threads(1)
    os.dup2(os.open(said or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # pytest's would be lost
    if printed is not None:
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if fresh:
        _forget_accelerate()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are the parent's, and would be waited for
    if count > 1:
        size = str(count)
        os.environ.update(meeting, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    return action(rank)


def _in_forks(
    action: Callable[[int], Any], count: int, meeting: dict[str, str], *, said: Path | None, printed: Path | None,
    fresh: bool,
) -> list[int]:  # fmt: skip
    sys.stdout.flush()
    children = []
    for rank in range(count):
        child = os.fork()
        if child:
            children.append(child)
            continue
        end_with(partial(_as_rank, action, rank, count, meeting, said=said, printed=printed, fresh=fresh))
    return [os.waitpid(child, 0)[1] for child in children]


def python(
    *arguments: str, code: str | None = None, module: str | None = None, cwd: Path | None = None,
    source: Path | None = None, environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """`python -c code` or `python -m module` with arguments, in a copy of this process.

    source: a folder with a tigon to import instead of this process's. environment: further variables.
    """

    def act(_: int) -> None:
        os.chdir(cwd or os.getcwd())
        os.environ.update(environment or {})
        if source is not None:
            forget_tigon()
            sys.path.insert(0, str(source))
            os.environ["PYTHONPATH"] = str(source)
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-c", *arguments]
        if module is not None:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            exec(compile(code or "", "<string>", "exec"), {"__name__": "__main__"})

    with tempfile.TemporaryDirectory() as folder:
        said, printed = Path(folder, "stderr"), Path(folder, "stdout")
        (status,) = in_forks(act, said=said, printed=printed)
        return subprocess.CompletedProcess(
            arguments, os.waitstatus_to_exitcode(status), printed.read_text(), said.read_text()
        )


def forget_tigon() -> None:
    """Have the next import read tigon's files again, and those of its tests. The other libraries stay imported."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in ("tigon", "benchmarks"):
            for value in vars(module).values():
                if isinstance(value, torch.library.Library):
                    value._destroy()  # its operators are defined anew
            del sys.modules[name]
        elif file and TESTS in Path(file).parents:
            del sys.modules[name]
    importlib.invalidate_caches()


def _forget_accelerate() -> None:
    state = sys.modules.get("accelerate.state")
    for name in ("AcceleratorState", "GradientState", "PartialState"):
        if state is not None:
            getattr(state, name)._shared_state.clear()
