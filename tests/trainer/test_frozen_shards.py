"""The reference of TRL's trainers has one FSDP2 unit per decoder layer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from test_technique_runs import succeeds

from forks import forks
from tigon.trainer.distributed.frozen_shards import divide_layers


def reference() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def accelerator(is_fsdp2: bool) -> Any:
    from torch.distributed.fsdp import OffloadPolicy

    plugin = SimpleNamespace(reshard_after_forward=True, mixed_precision_policy=None, cpu_offload=OffloadPolicy())
    return SimpleNamespace(is_fsdp2=is_fsdp2, torch_device_mesh=None, state=SimpleNamespace(fsdp_plugin=plugin))


@forks
def test_each_layer_of_a_reference_is_a_unit_and_computes_what_the_whole_model_computes(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        import torch
        from torch import distributed
        from torch.distributed.fsdp import FSDPModule, fully_shard

        distributed.init_process_group("gloo")
        torch.manual_seed(0)
        model = reference()
        ids = torch.arange(12).view(1, 12)
        with torch.no_grad():
            want = model(input_ids=ids).logits
            divide_layers(model, accelerator(is_fsdp2=True))
            units = [type(module) for module in model.modules() if isinstance(module, FSDPModule)]
            assert len(units) == 3, units
            fully_shard(model, reshard_after_forward=True)  # as TRL does
            torch.testing.assert_close(model(input_ids=ids).logits, want)
            sizes = {name: weight.to_local().numel() * 2 for name, weight in model.named_parameters()}
            assert sizes == {name: weight.numel() for name, weight in model.named_parameters()}, "a weight is whole"
        distributed.destroy_process_group()

    succeeds(act, tmp_path, 2)


def test_reference_stays_whole_without_fsdp2() -> None:
    model = reference()
    before = [type(module) for module in model.modules()]
    divide_layers(model, accelerator(is_fsdp2=False))
    assert [type(module) for module in model.modules()] == before
