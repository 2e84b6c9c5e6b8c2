"""Runs one point of a sweep in new processes, and makes a record of what they found or why they ended."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tigon.errors import RecipeError
from tigon.planner.gpus import row_of
from tigon.recipe.keys import Recipe
from tigon.sweep import failures, self_test
from tigon.sweep.definition import Sweep
from tigon.sweep.folder import SweepFolder
from tigon.sweep.points import Point, as_yaml
from tigon.sweep.processes import Workers
from tigon.sweep.schema import SCHEMA
from tigon.sweep.self_test import Kind
from tigon.trainer import model as models
from tigon.trainer.guards import prediction

PROBE_TIMEOUT_S = 600.0
"""Probing the machine and compiling the kernels for the self-test takes a minute. A broken kernel may never end."""
_PROCESS_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes")


@dataclass
class Measuring:
    """What the points of a sweep are measured with."""

    sweep: Sweep
    folder: SweepFolder
    workers: Workers
    limit_bytes: int | None
    command: str
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The machine, once it is probed."""
    self_tests: dict[Kind, dict[str, Any]] = field(default_factory=dict)
    """Result of the kernels' self-test for each kind of point."""

    def probe(self, kinds: Sequence[Kind]) -> None:
        """Have a worker describe the machine and test the kernels. Raises RecipeError if no worker can run."""
        log, kills = self.folder.log("probe"), failures.kernel_kills()
        with tempfile.TemporaryDirectory(prefix="tigon-sweep-") as room:
            answer = Path(room) / "probe.json"
            with self.workers.carry_out({"probe": str(answer), "kinds": kinds}, log) as group:
                code = group.wait(PROBE_TIMEOUT_S)
            if not answer.exists():
                slow = f"the probe of the machine and its kernels took longer than {PROBE_TIMEOUT_S:g} s"
                detail = slow if code is None else failures.status_of_exit(code, log, kills)[1]
                raise RecipeError(f"a point cannot be started: {detail}; the full output is in {log}")
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        self.self_tests = dict(zip(kinds, found["self_tests"], strict=True))
        wrong = self_test.merged({one["dtype"]: one["wrong_ops"]} for one in found["self_tests"] if one["wrong_ops"])
        self.environment = {**found["environment"], "wrong_ops": wrong}

    def measure(self, point: Point, repeat: int, meanwhile: Callable[[], None]) -> dict[str, Any]:
        """Run one repeat of a point and return its record, also if it fails. meanwhile: called while it runs."""
        assert point.recipe is not None, "refused points are not measured"
        recipe, began_s = point.recipe.as_mapping(), time.perf_counter()
        tried = self.self_tests[self_test.kind_of(point.recipe)]
        # techniques may write files as large as the model, which do not belong into the results folder
        with tempfile.TemporaryDirectory(prefix="tigon-sweep-") as room:
            recipe_file, files = Path(room) / "recipe.yaml", Path(room) / "files"
            recipe_file.write_text(as_yaml(recipe), encoding="utf-8")
            files.mkdir()
            order = {
                "recipe": str(recipe_file),
                "rows": self.sweep.rows,
                "unchecked": point.unchecked,
                "folder": str(files),
                "limit_bytes": self.limit_bytes,
                "result": f"{room}/result",
                "self_test": tried,
            }
            log = self.folder.log(point.file, repeat)
            outputs, ended = self._carry_out(order, log, point.recipe.sharding.gpus, meanwhile)
        status, detail = failures.worst(outputs, ended)
        return {
            "schema": SCHEMA,
            "id": point.id,
            "key": point.key,
            "variant": point.variant,
            "axes": dict(point.axes),
            "repeat": repeat,
            "status": status,
            "detail": detail,
            "measured": _combined(outputs) if status == failures.OK else None,
            "wall_s": time.perf_counter() - began_s,
            "environment": self.environment,
            "command": self.command,
            "memory_limit_bytes": self.limit_bytes,
            "recipe": recipe,
            "wrong_ops": tried["wrong_ops"],
        }

    def _carry_out(
        self, order: Mapping[str, Any], log: Path, processes: int, meanwhile: Callable[[], None]
    ) -> tuple[list[dict[str, Any]], tuple[str, str] | None]:
        """(the processes' results, how they ended if one left none)"""
        kills, until_s = failures.kernel_kills(), time.perf_counter() + self.sweep.timeout
        with self.workers.carry_out(order, log, processes=processes) as group:
            meanwhile()
            code = group.wait(max(1.0, until_s - time.perf_counter()))
        files = sorted(Path(order["result"]).parent.glob("result.*"))
        outputs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        if len(outputs) == processes:
            return outputs, None
        return outputs, failures.status_of_processes(outputs, code, log, kills, self.sweep.timeout)


def _combined(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One set of figures for all processes: those of the first, with the highest peak of any process."""
    measured = {name: value for name, value in outputs[0].items() if name not in ("status", "detail")}
    for name in _PROCESS_PEAKS:
        measured[name] = max((one[name] for one in outputs if one[name] is not None), default=None)
    return measured | {"processes": len(outputs)}


def predict(recipe: Recipe, device: str, memory_bytes: int) -> dict[str, Any]:
    """Predict a recipe's memory peaks and step time on a GPU.

    device: the driver's name of the GPU. memory_bytes: its memory, or the sweep's limit if that is lower. Raises
    TigonError if the planner refuses the recipe.
    """
    gpu = replace(row_of(device, memory_bytes), memory_bytes=memory_bytes)
    config = models.load_config(recipe.model)
    return prediction.predict(recipe, config, recipe.settings(), gpu, evaluated=False).as_mapping()
