"""One process of one point: `python -m tigon.sweep.worker.worker`.

The process imports what a point needs, and then waits for its order (orders.py). Each process writes a separate result
file.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tigon._quiet import quiet_loading
from tigon.errors import KernelError, TigonError
from tigon.objectives import recipe_checks
from tigon.sweep import failures
from tigon.sweep.self_test import Kind, try_ops
from tigon.sweep.worker import orders
from tigon.trainer.checkpoint import nvme_swap
from tigon.trainer.distributed import launch


def main() -> None:
    import tigon.sweep.worker.measure  # noqa: F401  # loads transformers

    order = orders.take_order()
    if "probe" in order:
        orders.write(Path(order["probe"]), _probe(order))
        return
    target = Path(f"{order['result']}.{os.environ.get('RANK', '0')}")
    result = _carry_out(order)
    orders.write(target, result)
    if result["status"] != "ok":
        os._exit(1)  # a normal exit may hang: other processes may still wait for this one in a collective
    _leave()


def _carry_out(order: dict[str, Any]) -> dict[str, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from tigon.sweep.worker.measure import measure  # loads transformers

        if "OMP_NUM_THREADS" not in os.environ:  # divide the cores among the processes of the point
            torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        quiet_loading()
        tried = order["self_test"]
        if tried["refused"]:
            raise KernelError(tried["refused"])
        recipe = recipe_checks.load(Path(order["recipe"]), gpu_present=lambda: False, checked=not order["unchecked"])
        with nvme_swap.own_files(recipe.sharding.nvme_folder):
            measured = measure(
                recipe,
                how_rows=order["rows"],
                unchecked=order["unchecked"],
                limit_bytes=order["limit_bytes"],
                folder=Path(order["folder"]),
                wrong_ops=tried["wrong_ops"],
            )
        return {"status": failures.OK, "detail": "", **measured}
    except TigonError as error:
        print(error, file=sys.stderr)
        return {"status": failures.REFUSED, "detail": failures.line(error)}
    except BaseException as error:  # any error is the result of this point and must be recorded
        traceback.print_exc()
        status, detail = failures.status_of_exception(error)
        return {"status": status, "detail": detail}


def _probe(order: dict[str, Any]) -> dict[str, Any]:
    """The machine's environment and the result of the self-test. A separate process, because both take GPU memory."""
    from tigon.sweep.worker.measure import environment  # loads transformers

    # the environment first: after a kernel fails badly, the GPU no longer answers this process
    machine = environment(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    return {"environment": machine, "self_tests": [try_ops(Kind(*kind)) for kind in order["kinds"]]}


def _leave() -> None:
    if launch.started_by_launcher():
        launch.shutdown_distributed()


if __name__ == "__main__":
    main()
