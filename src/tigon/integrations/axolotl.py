"""tigon as a plugin of Axolotl: one line in its configuration.

    plugins: [tigon.integrations.axolotl.TigonPlugin]

The plugin patches the model before adapters are added. After the training it undoes the patch. With a trainer of TRL
(`rl: dpo` and others) it also fuses the head.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tigon.errors import PatchError, UsageError
from tigon.integrations import trl
from tigon.models import PatchReport, patch

if TYPE_CHECKING:
    from axolotl.utils.dict import DictDefault
    from transformers import PreTrainedModel, Trainer

try:  # Axolotl calls every hook of its base class. Without Axolotl this class documents and tests its own hooks.
    from axolotl.integrations.base import BasePlugin
except ImportError:
    BasePlugin = object

LOG = logging.getLogger(__name__)
OPS = ("rms_norm", "layer_norm", "rope", "mlp", "cross_entropy", "linear_cross_entropy")
"""The flags of `tigon.patch`."""
OTHERS = ("LigerPlugin", "CutCrossEntropyPlugin")
"""Plugins that replace the same layers for the whole process."""


class TigonArgs(BaseModel):
    """The keys that the plugin adds to Axolotl's configuration."""

    tigon_leave_out: list[str] | None = None
    """Flags of `tigon.patch` whose modules keep their own code, such as `[rope]`."""


class TigonPlugin(BasePlugin):  # type: ignore[misc]  # Axolotl is optional
    """Patches the model that Axolotl trains, and undoes it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.report: PatchReport | None = None
        self.fused: trl.FusedTrainer | None = None

    def get_input_args(self) -> str:
        """The name of the class with the plugin's keys."""
        return f"{__name__}.{TigonArgs.__name__}"

    def register(self, cfg: DictDefault) -> None:
        """Check the keys.

        Raises:
            UsageError: `tigon_leave_out` names no flag of `tigon.patch`, or another plugin replaces the same layers.
        """
        unknown = sorted(set(_get(cfg, "tigon_leave_out") or ()) - set(OPS))
        if unknown:
            raise UsageError(f"tigon_leave_out has {', '.join(unknown)}; it takes {', '.join(OPS)}.")
        others = [one for one in _get(cfg, "plugins") or () if str(one).endswith(OTHERS)]
        if others:
            raise UsageError(f"plugins has {others[0]}, which replaces the same layers as tigon; remove one of them.")

    def post_model_build(self, cfg: DictDefault, model: PreTrainedModel) -> None:
        """Patch the model, before adapters are added.

        Raises:
            PatchError: No module of the model matches an op of tigon.
        """
        left_out = _get(cfg, "tigon_leave_out") or ()
        self.report = patch(model, **dict.fromkeys(left_out, False))
        LOG.info("%s", self.report)

    def post_trainer_create(self, cfg: DictDefault, trainer: Trainer) -> None:
        """Fuse the head of a trainer of TRL. Other trainers use the patched model's loss."""
        try:
            self.fused = trl.fuse(trainer)
        except UsageError as reason:
            LOG.info("tigon does not fuse %s: %s", type(trainer).__name__, reason)

    def post_train(self, cfg: DictDefault, model: PreTrainedModel) -> None:
        """Undo all changes. A model that was wrapped in the meantime keeps its patch, with a warning."""
        if self.fused is not None:
            self.fused.restore()
            self.fused = None
        if self.report is not None:
            try:
                self.report.undo()
                self.report = None
            except PatchError as reason:
                LOG.warning("tigon's patch stays: %s", reason)


def _get(cfg: DictDefault, name: str) -> Any:
    """A key of Axolotl's configuration, which is a dictionary with attributes; None if it is not set."""
    return cfg.get(name) if hasattr(cfg, "get") else getattr(cfg, name, None)
