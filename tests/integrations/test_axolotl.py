"""The plugin for Axolotl against Axolotl's published interface: its manager calls these hooks in this order.

Interface: src/axolotl/integrations/base.py, read at commit 002a637c86. Axolotl itself is not needed;
test_axolotl_run.py runs it.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
transformers = pytest.importorskip("transformers")

from tigon.errors import UsageError  # noqa: E402
from tigon.integrations import axolotl  # noqa: E402

HOOKS = {
    "register": ("cfg",), "get_input_args": (), "post_model_build": ("cfg", "model"),
    "post_trainer_create": ("cfg", "trainer"), "post_train": ("cfg", "model"),
}  # fmt: skip
"""Hook of Axolotl's BasePlugin -> its parameters, which the manager passes by position."""


def small_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def load(name: str) -> Any:
    """What Axolotl does with an entry of `plugins`: import the module, call the class without arguments."""
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(module), cls)()


@pytest.fixture
def plugin() -> Any:
    return load("tigon.integrations.axolotl.TigonPlugin")


def test_hooks_take_what_the_manager_passes() -> None:
    for name, parameters in HOOKS.items():
        signature = inspect.signature(getattr(axolotl.TigonPlugin, name))
        assert tuple(signature.parameters)[1:] == parameters


def test_training_with_the_plugin_computes_the_same_loss_and_ends_unpatched(plugin: Any) -> None:
    cfg = {"plugins": ["tigon.integrations.axolotl.TigonPlugin"]}
    model, ids = small_model().train(), torch.arange(12).reshape(2, 6)
    classes = [type(module) for module in model.modules()]
    before = model(input_ids=ids, labels=ids).loss
    plugin.register(cfg)
    plugin.post_model_build(cfg, model)
    assert plugin.report.counts["linear_cross_entropy"] == 1
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, before, rtol=1e-5, atol=1e-6)
    plugin.post_train(cfg, model)
    assert [type(module) for module in model.modules()] == classes
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, before, rtol=0, atol=0)


def test_tigon_leave_out_keeps_modules_their_own(plugin: Any) -> None:
    cfg = {"tigon_leave_out": ["rope", "mlp"]}
    plugin.register(cfg)
    plugin.post_model_build(cfg, small_model())
    assert "rope" not in plugin.report.counts and "rms_norm" in plugin.report.counts


def test_keys_of_the_plugin_are_a_pydantic_model(plugin: Any) -> None:
    args = load_class(plugin.get_input_args())
    assert args(tigon_leave_out=["rope"]).tigon_leave_out == ["rope"]


def load_class(name: str) -> Any:
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(module), cls)


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        ({"tigon_leave_out": ["ropes"]}, "tigon_leave_out has ropes"),
        ({"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, "remove one of them"),
    ],
)
def test_wrong_configuration_is_refused_by_name(plugin: Any, cfg: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plugin.register(cfg)


def test_trainer_that_is_not_of_trl_keeps_its_loss(plugin: Any) -> None:
    plugin.post_trainer_create({}, object())
    assert plugin.fused is None
