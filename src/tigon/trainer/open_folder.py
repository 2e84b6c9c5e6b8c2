"""Opens the run folder, a new one or that of the run to resume, together with the other processes.

If the nodes do not share a disk (distributed/node_disks.py), each node has the folder on its own.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.errors import DataError, RunFolderError, TigonError
from tigon.trainer import run_folder
from tigon.trainer.checkpoint import node_files
from tigon.trainer.distributed import launch, launch_folder, node_disks
from tigon.trainer.guards import fault_messages, preflight, system_limits
from tigon.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from tigon.trainer.prepare import Prepared


def create(prepared: Prepared, command: str, held: ExitStack) -> RunFolder:
    """Create the folder of a new run, on each node's disk if they do not share one. Every process calls it.

    held: The stack that releases the folder's lock when the run ends.
    """
    folder = ""
    if launch.rank() == 0:
        run = run_folder.create(prepared.recipe.output, command)
        try:
            _write_inputs(run, prepared)
        except BaseException as error:
            shutil.rmtree(run.path, ignore_errors=True)  # otherwise the next attempt is refused: the folder exists
            if isinstance(error, OSError):
                reason = system_limits.words(error) or error.strerror
                raise RunFolderError(f"{run.path}: cannot be written: {reason}; then start the run again") from None
            raise
        folder = str(run.path)
    run = RunFolder(Path(launch.broadcast(folder)))
    open_new(run.path, offload=prepared.settings.sharding.offload)
    if node_disks.is_writer() and launch.rank() > 0:
        _write_description(run, prepared)
    if node_disks.is_writer():
        held.enter_context(run_folder.locked(run.path))
    return run


def join(run: RunFolder, prepared: Prepared, console: Console, held: ExitStack) -> RunFolder:
    """Continue a run: choose the checkpoint with the other nodes, and check that the run is the same.

    Args:
        run: The folder, with the newest checkpoint in the main process.
        prepared: The run.
        console: For what was found.
        held: The stack that releases the locks of other nodes' folders when the run ends.
    """
    run = launch.broadcast(run)
    copied = open_again(run.path)
    assert run.resume_point is not None
    same = not any(name.startswith("sharding.") for name, _, _ in run.changed)
    same = same and run.resume_point.metadata.get("processes") == launch.world_size()
    try:
        point, lines = node_files.agree(run.resume_point, same=same)
    except (RunFolderError, SystemExit):
        with suppress(OSError):  # it is empty if this node had none
            run.path.rmdir()
        raise
    run = replace(run, resume_point=point)
    if node_disks.is_writer():
        launch_folder.mark(run.path)
        if launch.rank() > 0:
            if not (run.path / run_folder.RECIPE).is_file():
                _write_description(run, prepared)
            held.enter_context(run_folder.locked(run.path))
    launch.gather(None)  # other processes of a node read what its writer has just written
    for line in (*copied, *lines):
        console.print(f"disks    {line}", markup=False, soft_wrap=True)
    fault_messages.check_same_run(run, prepared, console)
    return run


def _write_description(run: RunFolder, prepared: Prepared) -> None:
    """Write the files that identify a run and make its checkpoints usable: each node's disk has them."""
    import yaml

    text = yaml.safe_dump(prepared.recipe.as_mapping(), sort_keys=False, allow_unicode=True)
    launch_folder.mark(run.path)
    run.write_text(run_folder.RECIPE, "# The resolved recipe of this run.\n" + text)
    run.write_json(run_folder.ENVIRONMENT, preflight.environment(prepared.device))
    run.write_json(run_folder.DATA, prepared.data)
    prepared.saved_tokenizer.save_pretrained(run.path / "tokenizer")


def _write_inputs(run: RunFolder, prepared: Prepared) -> None:
    _write_description(run, prepared)
    run.append({"event": "data", "step": 0, **prepared.data})
    if prepared.warnings:
        run.append({"event": "warnings", "step": 0, "warnings": list(prepared.warnings)})
    if prepared.wrong_ops:
        run.append({"event": "self_test", "step": 0, "wrong_ops": dict(prepared.wrong_ops)})
    if prepared.unused_tensors:
        run.append({"event": "checkpoint", "step": 0, "unused_tensors": list(prepared.unused_tensors)})


def check_same_data(data: Mapping[str, Any]) -> None:
    """Check that every node has read the same data. Every process calls it with its `Prepared.data`.

    Raises:
        DataError: In the main process, if a node has other data.
        SystemExit: In the others then, with code 2.
    """
    if not launch.has_several_nodes():
        return
    answers = launch.gather((data["fingerprint"], socket.gethostname(), data["tokens"]))
    other = next((rank for rank, answer in enumerate(answers) if answer[0] != answers[0][0]), None)
    if other is None:
        return
    if launch.rank() > 0:
        raise SystemExit(2)
    raise DataError(
        f"the data of process {other} on {answers[other][1]} differ from those of process 0 on {answers[0][1]} "
        f"({answers[other][2]:,} and {answers[0][2]:,} tokens); give all nodes the same data files"
    )


def open_new(path: Path, *, offload: str = "none") -> None:
    """Find out which nodes share the new run folder `path`, and create it on the others' disks.

    Args:
        path: The run folder.
        offload: The value of `sharding.offload`.

    Raises:
        TigonError: In the main process, if a node cannot have the folder; no node keeps it then.
        SystemExit: In the others then, with code 2.
    """
    try:
        _open_new(path, offload)
    except TigonError:
        if launch.rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise


def _open_new(path: Path, offload: str) -> None:
    disks = node_disks.find(path)
    if disks is None:
        return
    problem = ""
    if offload == "nvme":  # DeepSpeed copies its files into checkpoints itself
        problem = (
            f"sharding.offload: nvme has not been tried with {path} on each node's own disk; set output.folder to a "
            "folder on a disk that all nodes share, or use sharding.offload: cpu"
        )
    if node_disks.is_writer() and launch.rank() > 0 and any(path.iterdir()):
        if launch_folder.is_marked(path):  # an earlier attempt of this launch, without a checkpoint to continue from
            shutil.rmtree(path)
            path.mkdir()
        else:
            problem = f"{disks.place}: this folder exists there; remove it, or choose another output.name"
    problems = list(filter(None, launch.gather(problem)))
    if problems and launch.rank() == 0:
        raise RunFolderError(problems[0])
    if problems:
        with suppress(OSError):  # it is not empty if it existed before
            path.rmdir()
        raise SystemExit(2)


def open_again(path: Path) -> list[str]:
    """Find out which nodes share the run folder `path` of an earlier run. Raises as `node_disks.find`.

    Returns:
        A line for the user if a node has no such folder.
    """
    had = launch.gather(path.is_dir()) if launch.has_several_nodes() else []
    disks = node_disks.find(path)
    new = [disks.hosts[i] for i, ranks in enumerate(disks.processes) if not had[ranks[0]]] if disks else []
    return [f"{path} was not on {', '.join(new)}"] if new else []


def lines(path: Path, *, divided: bool) -> list[str]:
    """The line for the user about the disks of several nodes; [] with one node.

    divided: Whether each node has only its own part of a checkpoint.
    """
    disks = node_disks.several()
    if disks is None:
        return [f"disks    all nodes share {path}"] if launch.has_several_nodes() else []
    kept = "the files of its own processes" if divided else "whole checkpoints"
    return [
        f"disks    each of the {disks.count} nodes has {path} on its own disk and keeps {kept} there; records, report "
        f"and final model are on {disks.hosts[0]}"
    ]
