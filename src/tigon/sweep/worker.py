"""One process of one point: `python -m tigon.sweep.worker`.

It imports what a point needs, says so where it was started ahead, and reads a line from its standard input: where its
order is, and which of several processes it is. Each process writes its own result beside the others'. It ends when the
sweep does, however that ended: the sweep holds the other end of its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


def main() -> None:
    import tigon.sweep.measure  # noqa: F401

    order = take_order()
    if "probe" in order:
        write(Path(order["probe"]), _probe(order))
        return
    target = Path(f"{order['result']}.{os.environ.get('RANK', '0')}")
    result = _carry_out(order)
    write(target, result)
    if result["status"] != "ok":
        os._exit(1)  # other processes may wait for this one in a collective, and so may their goodbye
    _leave()


def take_order() -> dict[str, Any]:
    """Say that this process is ready, if it was asked to, and wait for what it shall do and as which of several."""
    if sign := os.environ.get("TIGON_SWEEP_READY"):
        Path(sign).touch()
    told = json.loads(sys.stdin.readline() or sys.exit(1))
    _end_with_the_sweep()
    os.environ.update(told["environment"])
    order: dict[str, Any] = json.loads(Path(told["order"]).read_text(encoding="utf-8"))
    return order


def _carry_out(order: dict[str, Any]) -> dict[str, Any]:
    from tigon.errors import KernelError, TigonError
    from tigon.sweep import failures

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch
        import transformers

        from tigon.recipe import recipe_file
        from tigon.sweep.measure import measure
        from tigon.trainer.checkpoint import nvme_swap

        if "OMP_NUM_THREADS" not in os.environ:  # a share of the cores each, not all of them
            torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        tried = order["self_test"]
        if tried["refused"]:
            raise KernelError(tried["refused"])
        recipe = recipe_file.load(Path(order["recipe"]), gpu_present=lambda: False, checked=not order["unchecked"])
        with nvme_swap.own_files(recipe.sharding.nvme_folder):
            found = measure(
                recipe, how_rows=order["rows"], unchecked=order["unchecked"], limit_bytes=order["limit_bytes"],
                folder=Path(order["folder"]), wrong_ops=tried["wrong_ops"],
            )  # fmt: skip
        return {"status": failures.OK, "detail": "", **found}
    except TigonError as error:
        print(error, file=sys.stderr)
        return {"status": failures.REFUSED, "detail": failures.line(error)}
    except BaseException as error:  # whatever it is, it is this point's result, and must not be lost
        import traceback

        traceback.print_exc()
        status, detail = failures.of_exception(error)
        return {"status": status, "detail": detail}


def _probe(order: dict[str, Any]) -> dict[str, Any]:
    """What the machine is, and which kernels are wrong on it. In a process of its own, because both take GPU memory."""
    import torch

    from tigon.sweep.measure import environment
    from tigon.sweep.self_test import Kind, try_ops

    # the machine first: a kernel that fails badly leaves a GPU that answers this process no more
    machine = environment(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    return {"environment": machine, "self_tests": [try_ops(Kind(*kind)) for kind in order["kinds"]]}


def write(path: Path, value: Any) -> None:
    """Whole or not at all, and on the disk when this returns."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as handle:
        json.dump(value, handle, indent=1)
        handle.write("\n")
        handle.flush()
        os.fsync(handle.fileno())
    scratch.replace(path)


def _end_with_the_sweep() -> None:
    def wait() -> None:
        os.read(0, 1)  # returns when the sweep closes its end, or dies
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _leave() -> None:
    from tigon.trainer.distributed import launch

    if launch.joined():
        launch.leave()


if __name__ == "__main__":
    main()
