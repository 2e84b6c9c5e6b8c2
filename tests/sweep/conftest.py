"""A sweep file, and a worker that ends as it is told instead of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import tigon, undrawn  # noqa: F401
from wrong_ops import wrong  # noqa: F401

yaml = pytest.importorskip("yaml")
for package in ("transformers", "typer", "rich", "matplotlib", "jinja2"):
    pytest.importorskip(package)

# The point's seed chooses its behaviour; it writes the files of a worker.
FAKE_WORKER = """
import importlib.util, json, os, sys, time
from pathlib import Path
import yaml
# by its path: importing tigon imports PyTorch, which takes seconds
spec = importlib.util.spec_from_file_location("orders", os.environ["TIGON_TEST_ORDERS"])
orders = importlib.util.module_from_spec(spec)
spec.loader.exec_module(orders)
order = orders.take_order()
gpu = os.environ.get("TIGON_TEST_GPU")
if "probe" in order:
    wrong = json.loads(os.environ.get("TIGON_TEST_WRONG", "{}"))
    answer = {"dtype": "bf16", "wrong_ops": {}, "refused": "", **wrong}
    tried = [answer if kind[0] == "tigon" else {**answer, "wrong_ops": {}, "refused": ""} for kind in order["kinds"]]
    machine = {"device": gpu or "CPU (test)", "driver": None, "threads": 1,
               "memory_bytes": 139 * 2**30 if gpu else None, "gpus": 0, "versions": {"torch": "0"},
               "tigon_commit": "abc", "date": "2026-01-01"}
    orders.write(Path(order["probe"]), {"environment": machine, "self_tests": tried})
    sys.exit()
recipe = yaml.safe_load(Path(order["recipe"]).read_text())
rank = os.environ.get("RANK", "0")
size, seed = recipe["train"]["batch_size"], recipe["train"]["seed"]
Path(order["result"]).with_name("started").touch()
with open(os.environ["TIGON_TEST_STARTED"], "a") as said:
    said.write(f"{size} {seed} {os.getpid()} {','.join(order['self_test']['wrong_ops'])}\\n")
if seed == 2 and size >= 16:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has little.")
if seed == 3:
    os.kill(os.getpid(), 9)
if seed == 4:
    time.sleep(60)
if seed == 5:
    print("Traceback"); sys.exit("ValueError: the moon is full")
if seed == 7:
    print("process", rank, "is here", flush=True)
if seed == 7 and rank == "1":
    while not Path(order["result"] + ".0").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
if seed == 7:
    orders.write(Path(order["result"] + ".0"), {"status": "failed", "detail": "connection closed by peer"})
    time.sleep(60)  # until the sweep ends it
if seed == 6 and size == 8:
    time.sleep(60)
orders.write(Path(order["result"] + "." + rank), {"status": "ok", "detail": "", "peak_allocated_bytes": size * 2**20,
    "peak_reserved_bytes": None, "peak_resident_bytes": 1, "outside_bytes": None, "phases": {},
    "step_s": [9.0, 0.5, 1.0, 0.1], "updated": [True, True, True, False], "positions": [size * 8] * 4,
    "losses": [2.0, 1.0], "parameters": 7, "precision": "fp32"})
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    return tmp_path


@pytest.fixture
def write_sweep(here: Path) -> Callable[..., Path]:
    """Writes s.yaml: a grid of rows, and whatever keys are given."""

    def write(**keys: Any) -> Path:
        mapping: dict[str, Any] = {
            "name": "s",
            "recipe": {"train": {"device": "cpu", "precision": "fp32"}, "data": {"sequence_length": 8}},
            "grid": {"train.batch_size": [4, 8]},
            "rows": "random",
            "steps": 4,
            "warmup": 1,
        } | keys
        path = here / f"{mapping['name']}.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in mapping.items() if v is not None}, sort_keys=False))
        return path

    return write


@pytest.fixture
def fake_workers(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Points are carried out by FAKE_WORKER; returns the (batch size, seed) of those started so far."""
    from tigon.sweep import processes
    from tigon.sweep.worker import orders

    script, started = here / "fake_worker.py", here / "started.txt"
    script.write_text(FAKE_WORKER, encoding="utf-8")
    monkeypatch.setattr(processes, "WORKER", (str(script),))
    monkeypatch.setenv("TIGON_TEST_STARTED", str(started))
    monkeypatch.setenv("TIGON_TEST_ORDERS", orders.__file__)

    def seen() -> list[str]:
        text = started.read_text(encoding="utf-8") if started.exists() else ""
        return [" ".join(line.split()[:2]) for line in text.splitlines()]

    return seen
