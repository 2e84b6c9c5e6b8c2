"""Fixtures and hooks of the whole suite; `backends.py` says where an op can run."""

from __future__ import annotations

from collections.abc import Generator, Iterator

# First: it sets what torch and Triton read when they are imported.
from backends import HAS_GPU, HAS_TRITON, Backend, kernels_on_the_cpu  # isort: skip

import gc
import importlib.metadata
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from second_proofs import check_and_count

# DeepSpeed compiles an operator for minutes if it finds no cache. All tests share one, also those with a cache folder
# of their own. Each environment has its own: two would compile it in turn, because its command has their paths.
USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
OPERATORS = f"tigon-tests-{zlib.crc32(sys.prefix.encode()):08x}"
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(USER_CACHE / "torch_extensions" / OPERATORS))
COMPILER = os.environ.get("CXX", "c++")
"""The operator is compiled again whenever its command changes, so every test names the compiler alike."""

# Tests that say how often a step is traced, and plans of changed sources, must not depend on the user's cache.
os.environ.setdefault("TIGON_CACHE", "0")


@pytest.fixture(params=["reference", "kernel"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "reference":
        yield Backend("reference", torch.device("cpu"))
    elif HAS_GPU:
        yield Backend("kernel", torch.device("cuda", torch.cuda.current_device()))
    elif HAS_TRITON:
        with kernels_on_the_cpu():
            yield Backend("kernel", torch.device("cpu"))
    else:
        pytest.skip("triton is not installed: there are no kernels on this platform")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A mesh of one rank: tensors can be DTensors, and are freed and gathered as on many."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("gloo is not built in")
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter uses numpy, which warns where a GPU is silent: about overflows of exp(-x), whose 1 / (1 + inf)
    # is correctly 0, and about arithmetic on masked lanes. The third warning concerns the interpreter's own code.
    config.addinivalue_line("filterwarnings", "ignore:overflow encountered:RuntimeWarning:triton")
    config.addinivalue_line("filterwarnings", "ignore:invalid value encountered:RuntimeWarning:triton")
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning:triton")


def read_metadata_once() -> None:
    """Accelerate parses the metadata of a dozen packages in every run, and tigon those that it names in a report."""
    find = importlib.metadata.PathDistribution.metadata.fget
    known = dict[Any, Any]()

    def metadata(self: importlib.metadata.PathDistribution) -> Any:
        if self._path not in known:
            known[self._path] = find(self)
        return known[self._path]

    importlib.metadata.PathDistribution.metadata = property(metadata)


read_metadata_once()

MODULES = pytest.StashKey[tuple[object, int]]()
"""The module of the last test, and the number of imported modules before it."""

# The benchmark freezes all objects for a measurement and unfreezes them afterwards. Each collection after that, five
# for a measured row, would search every library and every collected test again.
gc.unfreeze = lambda: None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Runs and compilations collect garbage often, and would search every imported library for it each time."""
    os.environ["CXX"] = COMPILER
    os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD", None)  # a run sets it for its process, and another test is not one
    now = getattr(item, "module", None), len(sys.modules)
    if item.session.stash.get(MODULES, None) != now:
        item.session.stash[MODULES] = now
        gc.collect()
        gc.freeze()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Tests in several processes share one GPU, so none keeps what PyTorch's allocator has cached for a large case."""
    if HAS_GPU and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Importing and collecting make two million objects, of which none is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves some out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    check_and_count(config, items)
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device"))
