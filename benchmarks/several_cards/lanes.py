"""Lanes of cards: each runs its rows one after the other, in processes that see only its cards."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.several_cards.checkpoints import Checkpoints
from benchmarks.several_cards.rows import Row, sections
from tigon.sweep import failures
from tigon.sweep.processes import Workers

WORKER = ("-m", "benchmarks.several_cards.worker")
AHEAD = 6
"""Processes per card that import at the same time, so that most rows wait for no import."""
SLOW = 3
"""A row is ended after this many times the seconds it is expected to take."""
LEAST_S = 40.0
"""A row gets at least this long once its processes have imported, which takes a minute on a busy machine."""


class Lane:
    """A set of cards. Processes for several rows import together, before the first of these rows runs."""

    def __init__(self, cards: tuple[int, ...], folder: Path, checkpoints: Checkpoints, *, tiny: bool) -> None:
        self.cards, self.checkpoints, self.tiny = cards, checkpoints, tiny
        self.folder = folder / "-".join(map(str, cards))
        self.folder.mkdir(parents=True)
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        own = [names[card] if card < len(names) and names[card] else str(card) for card in cards]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(own)}
        self.workers = Workers(self.folder, worker=WORKER, environment=visible)

    def run(self, row: Row, ahead: int, most_s: float = math.inf) -> dict[str, Any]:
        """Run a row and return its line of the record.

        Args:
            row: The row.
            ahead: How many processes to start for the rows after it.
            most_s: Seconds after which it is ended, if `SLOW` does not end it before.
        """
        began_s = time.monotonic()
        log = self.folder / f"{''.join(c if c.isalnum() else '-' for c in row.name)}.log"
        room = self.folder / "room"
        shutil.rmtree(room, ignore_errors=True)
        (room / "files").mkdir(parents=True)
        recipe = room / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(self._sections(row)), encoding="utf-8")
        order = {
            "recipe": str(recipe),
            "folder": str(room / "files"),
            "result": str(room / "result"),
            "post_training": row.post_training,
            "profiled": row.profiled,
            "plain": row.plain,
            "without_cudnn": row.without_cudnn,
            "threads": 1 if self.tiny else None,
            "environment": dict(row.environment),
        }
        limit_s = min(most_s, SLOW * row.seconds if not self.tiny else 600)
        if (missing := row.cards - self.workers.n_ready) > 0:  # imports beside a row would slow its host
            self.workers.prepare(missing + ahead)
        with self.workers.carry_out(order, log, processes=row.cards) as group:
            used_s = time.monotonic() - began_s
            code = group.wait(max(0.0, min(most_s - used_s, max(LEAST_S, limit_s - used_s))))
        outputs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(room.glob("result.*"))]
        ended = None
        if len(outputs) < row.cards:
            ended = failures.status_of_processes(outputs, code, log, None, limit_s)
        status, detail = failures.worst(outputs, ended)
        seconds = round(time.monotonic() - began_s, 1)
        line = {"name": row.name, "cards": list(self.cards[: row.cards]), "status": status, "detail": detail}
        return {**line, "seconds": seconds, **(_combined(outputs) if status == failures.OK else {})}

    def _sections(self, row: Row) -> dict[str, dict[str, Any]]:
        """The recipe of a row, which names its checkpoint."""
        recipe = sections(row, tiny=self.tiny)
        if row.dense_layers is not None:
            folder = self.checkpoints.path(recipe["model"], row.dense_layers)
            recipe["model"] = {"name": str(folder), "self_test": recipe["model"]["self_test"]}
        return recipe

    def close(self) -> None:
        self.workers.close()


def _combined(outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the main process, with the highest peak of all."""
    first = {name: value for name, value in outputs[0].items() if name not in ("status", "detail")}
    peaks = [one["peak_bytes"] for one in outputs if one.get("peak_bytes") is not None]
    return first | {"peak_bytes": max(peaks, default=None)}


def run_stage(
    rows: Iterable[Row],
    lanes: list[Lane],
    left_s: Callable[[], float],
    keep: Callable[[Row, Mapping[str, Any]], None],
) -> list[Row]:
    """Run rows in their order, each in the next free lane. Returns those that time was too short for."""
    queue, skipped, lock = list(rows), list[Row](), threading.Lock()

    def work(lane: Lane) -> None:
        while True:
            with lock:
                if not queue:
                    return
                row = queue.pop(0)
                ahead = sum(one.cards for one in queue) // len(lanes)
            if left_s() < row.seconds:
                with lock:
                    skipped.append(row)
                continue
            line = lane.run(row, min(ahead, (1 if lane.tiny else AHEAD) * len(lane.cards)), left_s())
            with lock:
                keep(row, line)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return skipped
