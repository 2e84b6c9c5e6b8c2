"""One process of one point: `python -m tigon.sweep.worker [ORDER.json]`, alone or under PyTorch's launcher.

Without an order it imports what a point needs, says so, and reads the order's path from its standard input. Each
process writes its own result beside the others'. It ends when the sweep does, however that ended: the sweep holds the
other end of its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


def main() -> None:
    file = sys.argv[1] if len(sys.argv) > 1 else _order_when_ready()
    _end_with_the_sweep()
    order = json.loads(Path(file).read_text(encoding="utf-8"))
    if "probe" in order:
        write(Path(order["probe"]), _probe(order))
        return
    target = Path(f"{order['result']}.{os.environ.get('RANK', '0')}")
    result = _carry_out(order)
    write(target, result)
    if result["status"] != "ok":
        os._exit(1)  # other processes may wait for this one in a collective, and so may their goodbye
    _leave()


def _order_when_ready() -> str:
    import tigon.sweep.measure  # noqa: F401

    Path(os.environ["TIGON_SWEEP_READY"]).touch()
    file = sys.stdin.readline().strip()
    return file or sys.exit(1)


def _carry_out(order: dict[str, Any]) -> dict[str, Any]:
    from tigon.errors import KernelError, TigonError
    from tigon.sweep import failures

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers

        from tigon.sweep.measure import measure
        from tigon.train import recipe_file

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        tried = order["self_test"]
        if tried["refused"]:
            raise KernelError(tried["refused"])
        recipe = recipe_file.load(Path(order["recipe"]), gpu_present=lambda: False, checked=not order["unchecked"])
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
    from tigon.train import launch

    if launch.joined():
        launch.leave()


if __name__ == "__main__":
    main()
