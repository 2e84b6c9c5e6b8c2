"""Heads on disk: the names that vLLM and the authors' inference read, and heads that come back as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from heads_helpers import MEDUSA, MTP, SHARED, SPECS, with_heads

from tigon.errors import UsageError
from tigon.medusa import HeadsSpec, Objective, load_heads, save_heads

safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")


def saved(spec: HeadsSpec, folder: Path) -> Any:
    model = with_heads(spec, Objective())
    save_heads(
        spec, model.draft_heads.state_dict(), folder, head=model.lm_head.weight, base="base/model", n_layers=2
    )  # fmt: skip
    return model


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_saved_heads_are_loaded_bit_for_bit(spec: HeadsSpec, tmp_path: Path) -> None:
    model = saved(spec, tmp_path)
    found, state = load_heads(tmp_path)
    assert (found.kind, found.count, found.shared) == (spec.kind, spec.count, spec.shared)
    assert found.kind == "mtp" or found.layers == spec.layers
    assert state.keys() == model.draft_heads.state_dict().keys()
    for name, tensor in model.draft_heads.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_saved_heads_have_the_names_that_vllm_reads(tmp_path: Path) -> None:
    """What vllm/model_executor/models/medusa.py asks for: its module's parameters, or lm_heads.0.weight alone."""
    saved(MEDUSA, tmp_path / "separate")
    names = set(safetensors.load_file(tmp_path / "separate" / "model.safetensors"))
    assert names == {
        *(f"blocks.{k}.layers.{i}.{part}" for k in range(3) for i in range(2) for part in ("weight", "bias")),
        *(f"lm_heads.{k}.weight" for k in range(3)),
    }
    config = json.loads((tmp_path / "separate" / "config.json").read_text())
    # vllm/transformers_utils/configs/medusa.py: what it makes of the keys
    renamed: dict[str, Any] = {}
    for key, value in config.items():
        which = "num_heads" if "heads" in key else "num_hidden_layers" if "layers" in key else key
        new = which if "num" in key else key
        assert new not in renamed, "two keys become one"
        renamed[new] = value
    assert (renamed["num_heads"], renamed["num_hidden_layers"]) == (3, 2)
    assert renamed["architectures"] == ["MedusaModel"] and renamed["model_type"] == "medusa"
    assert (renamed["medusa_fc_bias"], renamed["original_lm_head"]) == (True, False)
    assert (renamed["vocab_size"], renamed["hidden_size"]) == (97, 32)
    model = saved(SHARED, tmp_path / "shared")
    shared = safetensors.load_file(tmp_path / "shared" / "model.safetensors")
    assert [name for name in shared if name.startswith("lm_head")] == ["lm_heads.0.weight"]
    assert torch.equal(shared["lm_heads.0.weight"], model.lm_head.weight)
    assert json.loads((tmp_path / "shared" / "config.json").read_text())["original_lm_head"] is True


@pytest.mark.parametrize("spec", [MEDUSA, SHARED], ids=["separate", "shared"])
def test_saved_heads_load_into_the_modules_of_the_medusa_authors(spec: HeadsSpec, tmp_path: Path) -> None:
    """nn.Sequential of residual blocks and a linear module, for each head, as medusa/model/medusa_model.py has them."""

    class ResBlock(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.nn.functional.silu(self.linear(x))

    model = saved(spec, tmp_path)
    theirs = torch.nn.ModuleList(
        torch.nn.Sequential(*(ResBlock() for _ in range(spec.layers)), torch.nn.Linear(32, 97, bias=False))
        for _ in range(spec.count)
    )
    file = tmp_path / "medusa_lm_head.pt"
    theirs.load_state_dict(torch.load(file, weights_only=True), strict=True)
    x = torch.randn(4, 32)
    for head, logits in zip(theirs, model.draft_heads.logits(x, model.lm_head), strict=True):
        torch.testing.assert_close(head(x), logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (spec.count, spec.layers)
    assert config["base_model_name_or_path"] == "base/model"
    if spec.shared:
        assert file.stat().st_size < 2 * 97 * 32 * 4 + 3 * 32 * 33 * 4 + 8000, "the lm_head is there once a head"


def test_heads_of_the_authors_trainer_are_read(tmp_path: Path) -> None:
    saved(MEDUSA, tmp_path)
    wanted = load_heads(tmp_path)[1]
    (tmp_path / "model.safetensors").unlink()
    found = load_heads(tmp_path)[1]
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], t) for n, t in wanted.items())


def test_mtp_modules_have_the_names_of_deepseek(tmp_path: Path) -> None:
    saved(MTP, tmp_path)
    names = set(safetensors.load_file(tmp_path / "model.safetensors"))
    for n in (2, 3):  # counting on from the model's two layers
        for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.q_proj", "mlp.down_proj"):
            assert f"model.layers.{n}.{part}.weight" in names
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 2


def test_folder_without_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_heads(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="lacks medusa_num_heads"):
        load_heads(tmp_path)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    with pytest.raises(UsageError, match="neither model"):
        load_heads(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "empty"])
def test_broken_heads_are_refused_with_their_path(name: str, tmp_path: Path) -> None:
    saved(MEDUSA, tmp_path)
    if name == "empty":
        safetensors.save_file({}, tmp_path / "model.safetensors")
    else:
        (tmp_path / name).write_text("[1, 2]")
    with pytest.raises(UsageError, match=str(tmp_path)):
        load_heads(tmp_path)
