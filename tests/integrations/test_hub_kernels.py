"""tigon's layers through the package `kernels`: a local repository, training and torch.compile, and undoing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

NEEDED = "kernels is not installed (pip install -e '.[hub-kernels]')"
kernels = pytest.importorskip("kernels", reason=NEEDED)
if not hasattr(kernels, "LocalLayerRepository"):  # without the package, the name is the folder tests/kernels
    pytest.skip(NEEDED, allow_module_level=True)
transformers = pytest.importorskip("transformers")

from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.utils import is_kernels_available, kernel_config  # noqa: E402
from transformers.utils.kernel_config import KernelConfig  # noqa: E402

from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping  # noqa: E402
from tigon.errors import UsageError  # noqa: E402
from tigon.integrations import hub_kernels  # noqa: E402

TRAINING = Mode.TRAINING | Mode.TORCH_COMPILE
SIZES = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small Llama whose RMSNorm is registered as in transformers with a fitting release of `kernels`."""
    registered = type("LlamaRMSNorm", (modeling_llama.LlamaRMSNorm,), {})
    if not hasattr(modeling_llama.LlamaRMSNorm, "kernel_layer_name"):
        kernels.replace_kernel_forward_from_hub(registered, "RMSNorm")
        monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", registered)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(SIZES).train()


def kernelized(model: Any, folder: Path, *, mode: Mode = TRAINING) -> Any:
    repository = LocalLayerRepository(repo_path=hub_kernels.write_repository(folder), layer_name="RMSNorm")
    with use_kernel_mapping({"RMSNorm": {"cpu": {mode: repository}}}, inherit_mapping=False):
        return kernelize(model, mode=mode, device="cpu")  # layers without an entry keep their own code


def loss_and_gradients(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    ids = torch.arange(12).reshape(2, 6)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def ours(model: Any) -> int:
    """Modules that run tigon's RMSNorm."""
    bound = (getattr(module.forward, "__func__", None) for module in model.modules())
    return sum(function is hub_kernels.RMSNorm.forward for function in bound)


def test_kernelized_model_trains_with_the_same_loss_and_gradients(model: Any, tmp_path: Path) -> None:
    before = loss_and_gradients(model)
    kernelized(model, tmp_path / "repository")
    assert ours(model) == 5
    after = loss_and_gradients(model)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


def test_undo_gives_every_layer_its_own_forward_again(model: Any, tmp_path: Path) -> None:
    before = loss_and_gradients(model)
    kernelized(model, tmp_path / "repository")
    assert hub_kernels.undo(model) == 5
    assert ours(model) == 0 and hub_kernels.undo(model) == 0
    torch.testing.assert_close(loss_and_gradients(model), before, rtol=0, atol=0)


def test_kernelized_layer_compiles_to_one_graph(model: Any, tmp_path: Path) -> None:
    kernelized(model, tmp_path / "repository")
    norm = model.model.norm
    x = torch.randn(3, 16)
    expected = norm(x)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)


def test_mapping_is_one_that_transformers_accepts(model: Any, tmp_path: Path) -> None:
    mapping = hub_kernels.mapping(tmp_path)
    config = KernelConfig({"RMSNorm": mapping["RMSNorm"]}, use_local_kernel=True)
    config.sanitize_kernel_mapping(model)
    assert config.registered_layer_names["model.norm"] == "RMSNorm"


@pytest.mark.skipif(
    not is_kernels_available(),
    reason=f"transformers {transformers.__version__} refuses kernels {kernels.__version__}",
)
def test_set_use_kernels_of_transformers_takes_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(SIZES).train()
    before = loss_and_gradients(model)
    supported = [*kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES, "cpu"]  # transformers offers kernels on GPUs only
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", supported)
    mapping = hub_kernels.mapping(hub_kernels.write_repository(tmp_path / "repository"))
    model.set_use_kernels(True, KernelConfig(mapping, use_local_kernel=True, inherit_mapping=False))
    assert ours(model) == 5
    torch.testing.assert_close(loss_and_gradients(model), before, rtol=1e-5, atol=1e-6)
    assert hub_kernels.undo(model) >= 5
    torch.testing.assert_close(loss_and_gradients(model), before, rtol=0, atol=0)


def test_repository_is_not_written_into_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="holds other files"):
        hub_kernels.write_repository(tmp_path)


def test_repository_may_be_written_again(tmp_path: Path) -> None:
    assert hub_kernels.write_repository(tmp_path / "a") == hub_kernels.write_repository(tmp_path / "a")


def test_rotary_layer_computes_what_transformers_computes() -> None:
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    angles = torch.randn(2, 5, 4).repeat(1, 1, 2)
    got = hub_kernels.RotaryEmbedding()(q, k, angles.cos(), angles.sin())
    torch.testing.assert_close(got, modeling_llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin()))
