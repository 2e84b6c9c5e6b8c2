"""The environment variables of launchers: incomplete ones are refused, and Accelerate's do not change a run."""

from __future__ import annotations

import os
import re

from tigon.errors import ProcessError

NAMED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # the variables that every launcher sets
OF_ONE_MACHINE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
OF_CLUSTERS = ("SLURM_STEP_NUM_TASKS", "PET_NNODES")  # the number of srun's tasks, or of a PyTorchJob's pods
ACCELERATES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
# Accelerate's variables that request something; the others only set details of it.
_USES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "CPU", "PARALLELISM_CONFIG")
_SETS = ("MIXED_PRECISION", "DYNAMO_BACKEND", "GRADIENT_ACCUMULATION_STEPS", "TORCH_DEVICE")
ASKS = (*(f"ACCELERATE_USE_{name}" for name in _USES), *(f"ACCELERATE_{name}" for name in _SETS))
ASKS_NOTHING = ("", "0", "1.0", "false", "no", "none", "off")


def check_environment() -> None:
    """Refuse variables of a launcher that are incomplete or impossible, such as `RANK` from another job's shell.

    Raises:
        ProcessError: Some variables are missing, a value is not a whole number, or a rank is not below its world size.
            Or a cluster has started several commands, and nothing connects them.
    """
    present = [name for name in (*NAMED, *OF_ONE_MACHINE) if name in os.environ]
    # Nothing reads an address alone, which cluster images and shell profiles set.
    stray = [name for name in present if name not in ("MASTER_ADDR", "MASTER_PORT")]
    for name in stray:
        if not re.fullmatch(r"\d{1,9}", os.environ[name]):
            raise _stray(f"{name} is {os.environ[name]!r} in the environment, but must be a whole number", name)
    missing = [name for name in NAMED if name not in os.environ]
    if stray and missing:
        raise _stray(f"{stray[0]} is set in the environment, but {missing[0]} is not", *stray)
    for part, whole in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if part in present and whole in present and int(os.environ[part]) >= int(os.environ[whole]):
            problem = f"{part} is {os.environ[part]} in the environment, but must be less than {whole}"
            raise _stray(f"{problem}, which is {os.environ[whole]}", part, whole)
    for name in OF_CLUSTERS:
        if "LOCAL_RANK" not in os.environ and os.environ.get(name, "1") not in ("", "1", "1:1"):
            raise ProcessError(
                f"{name} is {os.environ[name]} in the environment, but torchrun has not started this process; use "
                "`torchrun ... -m tigon train RECIPE.yaml` in each task or pod (docs/several-machines.md), or "
                f"`unset {name}` for a run of its own"
            )


def _stray(what: str, *names: str) -> ProcessError:
    return ProcessError(f"{what}; `unset {' '.join(names)}` for a run of one process, or start the run with torchrun")


def ignore_accelerate_variables() -> list[str]:
    """Remove Accelerate's variables, which would override the recipe. Returns warnings about those that would.

    `accelerate launch` sets them from its own configuration. A run could not be repeated if its precision or engine
    were not the ones in its recipe, report and checkpoints.
    """
    names = sorted(name for name in os.environ if name.startswith(ACCELERATES))
    values = {name: os.environ.pop(name) for name in names}
    ignored = [
        f"{name}={value}" for name, value in values.items() if name in ASKS and value.lower() not in ASKS_NOTHING
    ]
    return [f"{text} in the environment is ignored: the recipe decides" for text in ignored]
