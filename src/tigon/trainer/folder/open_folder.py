"""Opens the run folder, a new one or that of the run to resume, together with the other processes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.errors import RunFolderError
from tigon.trainer.checkpoint import checkpoint, resume_rules
from tigon.trainer.distributed import agreement, launch, torchrun
from tigon.trainer.folder import run_folder
from tigon.trainer.folder.run_folder import RunFolder
from tigon.trainer.guards import preflight, system_limits
from tigon.trainer.guards.fault_messages import checkpoint_metadata

if TYPE_CHECKING:
    from rich.console import Console

    from tigon.trainer.prepare import Prepared


def create(prepared: Prepared, held: ExitStack) -> RunFolder:
    """Create the folder of a new run. Every process calls it.

    held: The stack that releases the folder's lock when the run ends.
    """
    folder = ""
    if launch.rank() == 0:
        run = run_folder.create(prepared.recipe.output, prepared.command)
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
    try:
        agreement.check_shared(run.path)
    except RunFolderError:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    if launch.rank() == 0:
        held.enter_context(run_folder.locked(run.path))
    return run


def join(run: RunFolder, prepared: Prepared, console: Console) -> RunFolder:
    """Continue a run. Every process calls it. run: The folder and its newest checkpoint, in the main process.

    Raises:
        RunFolderError: The run has other data or settings than the run so far, or a process does not see its folder.
    """
    run = launch.broadcast(run)
    agreement.check_shared(run.path)
    if launch.rank() == 0:
        torchrun.mark(run.path)
    _check_same_run(run, prepared, console)
    return run


def _write_inputs(run: RunFolder, prepared: Prepared) -> None:
    """Write the files that identify a run and make its checkpoints usable, and the first records."""
    import yaml

    text = yaml.safe_dump(prepared.recipe.as_mapping(), sort_keys=False, allow_unicode=True)
    torchrun.mark(run.path)
    run.write_text(run_folder.RECIPE, "# The resolved recipe of this run.\n" + text)
    run.write_json(run_folder.ENVIRONMENT, preflight.environment(prepared.device))
    run.write_json(run_folder.DATA, prepared.data)
    prepared.saved_tokenizer.save_pretrained(run.path / "tokenizer")
    run.append({"event": "data", "step": 0, **prepared.data})
    if prepared.warnings:
        run.append({"event": "warnings", "step": 0, "warnings": list(prepared.warnings)})
    if prepared.wrong_ops:
        run.append({"event": "self_test", "step": 0, "wrong_ops": dict(prepared.wrong_ops)})
    if prepared.unused_tensors:
        run.append({"event": "checkpoint", "step": 0, "unused_tensors": list(prepared.unused_tensors)})


def _check_same_run(run: RunFolder, prepared: Prepared, console: Console) -> None:
    """Check that a resumed run has the data, samples per step and precision of the run so far.

    Other differences, and files that had to be repaired, become warnings on the console and in metrics.jsonl.

    Raises:
        RunFolderError: One of the three differs, or DeepSpeed's processes do; the message names every difference.
    """
    assert run.resume_point is not None
    before, then, now = run.read_json(run_folder.DATA), run.resume_point.metadata, checkpoint_metadata(prepared)
    refused = []
    if before["fingerprint"] != prepared.data["fingerprint"]:
        tokens = f"{before.get('tokens')} tokens then, {prepared.data['tokens']} now"
        refused.append(f"the data changed since the run began ({tokens})")
    titles = {resume_rules.SAMPLES_KEY: "samples per step", "processes": "processes", "precision": "train.precision"}
    refused += [
        f"{run.resume_point.path.name} was written with {title} {then.get(name)}, and this run has {now[name]}"
        for name, title in titles.items()
        if then.get(name) != now[name] and (name != "processes" or prepared.recipe.sharding.zero)
    ]
    if refused:
        raise RunFolderError(
            f"{run.path}: {'; '.join(refused)}; use the run's settings, or start a new run without --resume and "
            "with another output.name"
        )
    warnings = [*_mended(run, prepared), *_changed(run, then, now)]
    for line in warnings:
        console.out(f"warning  {line}")
    if launch.rank() == 0:
        run.append({"event": "resume", "step": checkpoint.step_of(run.resume_point.path), "warnings": warnings})


def _changed(run: RunFolder, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The allowed differences from the run so far, one sentence each."""
    assert run.resume_point is not None
    changes = [f"checkpoint skipped: {problem}" for problem in run.resume_point.passed_over]
    changes += [f"{name}: {old} before, {new} now; losses may differ in rounding" for name, old, new in run.changed]
    if then.get("processes") != now["processes"]:
        changes.append(
            f"processes: {then.get('processes')} before, {now['processes']} now: each step has the same samples; "
            "dropout masks other elements"
        )
    versions = {**then.get("versions", {}), "device": then.get("device")}
    current = {**now["versions"], "device": now["device"]}
    return changes + [
        f"{name} {versions.get(name)} before, {current[name]} now: losses may differ in rounding"
        for name in current
        if versions.get(name) != current[name] and (name in versions or name not in preflight.OF_SOME_RUNS)
    ]


def _mended(run: RunFolder, prepared: Prepared) -> list[str]:
    """Repair damaged files of the run folder that the report needs. Returns a sentence for each repair."""
    repairs = []
    data, environment = run.read_json(run_folder.DATA), preflight.environment(prepared.device)
    wrong = [name for name, value in prepared.data.items() if not _agrees(data.get(name), value)]
    if wrong:
        repairs.append(f"{run_folder.DATA}: {', '.join(wrong)} did not agree with the data and are corrected")
    try:
        intact = _is_environment(run.read_json(run_folder.ENVIRONMENT), environment)
    except RunFolderError:
        intact = False
    if not intact:
        repairs.append(
            f"{run_folder.ENVIRONMENT} is damaged or of another version of tigon; it is written again for this machine"
        )
    lost = run.damaged_lines()
    if lost:
        repairs.append(f"{run_folder.METRICS}: damaged lines that are dropped: {lost}")
    if not any(record["event"] == "data" for record in run.records()):
        repairs.append(f"{run_folder.METRICS} lacks its beginning; the report shows the remaining records")
    if launch.rank() == 0:
        if wrong:
            run.write_json(run_folder.DATA, prepared.data)
        if not intact:
            run.write_json(run_folder.ENVIRONMENT, environment)
    return repairs


def _agrees(then: Any, now: Any) -> bool:
    """Whether two values are equal; floats up to rounding, which may differ between machines."""
    return type(then) is type(now) and (math.isclose(then, now) if isinstance(now, float) else then == now)


def _is_environment(environment: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether `environment` has all parts of an environment and every key in them that the report reads."""
    if environment.keys() != now.keys() or not all(isinstance(part, dict) for part in environment.values()):
        return False
    of_some = {"gpu", "gpu_memory_bytes", *preflight.OF_SOME_RUNS}
    whole = all(now[part].keys() - environment[part].keys() <= of_some for part in now)
    return whole and isinstance(environment["hardware"]["device"], str)
