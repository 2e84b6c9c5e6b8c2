"""Train with Axolotl on the CPU, as `axolotl train` does, and print the losses: `python axolotl_run.py CONFIG.yaml`.

The last line is JSON: the logged losses, the plugins that Axolotl loaded, the trainers whose head was fused, and the
packages of the model's modules at the end.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}

from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets, load_preference_datasets
from axolotl.integrations.base import PluginManager
from axolotl.train import train

from tigon.integrations import trl

FUSED: list[str] = []


def noted(trainer: Any, fuse: Any = trl.fuse) -> Any:
    """`fuse`, with a note of what it fused."""
    fused = fuse(trainer)
    FUSED.append(type(trainer).__name__)
    return fused


def main() -> None:
    config = load_cfg(sys.argv[1])
    load = load_preference_datasets if config.rl else load_datasets
    model, _, trainer = train(cfg=config, dataset_meta=load(cfg=config))
    found = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "plugins": [type(plugin).__name__ for plugin in PluginManager.get_instance().plugins.values()],
        "fused": FUSED,
        "modules": sorted({type(module).__module__.partition(".")[0] for module in model.modules()}),
    }
    print(json.dumps(found))


if __name__ == "__main__":  # loading the data starts processes
    trl.fuse = noted
    main()
