"""MLPs in tiles of tokens: the same output and gradients, less memory, and nothing that is not an MLP of a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_llama import loss_and_gradients, small_llama
from torch import nn

from tests.short_names import settings_of
from tigon.errors import RecipeError
from tigon.profiler.recording.peak import PeakMeter
from tigon.techniques import TECHNIQUES, tiling
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import RunInfo

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
TILE = 24  # 100 tokens: four whole tiles and a rest


def llama(*, width: int = 32, **options: Any) -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return small_llama(width=width, intermediate_size=8 * width, mlp_bias=True, **heads, **options)


def tiled(model: Any, tokens: int = TILE, **settings: Any) -> Any:
    return TECHNIQUES["tiled-mlp"].model(model, settings_of({"train.mlp_tile_tokens": tokens, **settings}), RunInfo())


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        torch.testing.assert_close(
            got[name], expected, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, TILE, 99])
@pytest.mark.parametrize("kernels", [True, False], ids=["patched", "unpatched"])
def test_tiles_keep_loss_and_gradients(tokens, kernels):
    want = loss_and_gradients(llama(kernels=kernels))
    assert_same(loss_and_gradients(tiled(llama(kernels=kernels), tokens)), want)


def test_tiles_inside_checkpointed_layers_keep_loss_and_gradients():
    model = llama()
    TECHNIQUES["checkpointing-full"].model(model, Settings.of({"train.checkpointing": "full"}), RunInfo())
    assert_same(loss_and_gradients(tiled(model)), loss_and_gradients(llama()))


def test_tiles_under_autocast_keep_loss_and_gradients():
    def step(model: Any) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            ids = torch.randint(0, 64, (2, 50), generator=torch.Generator().manual_seed(1))
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}

    assert_same(step(tiled(llama())), step(llama()), rtol=2e-2, atol=2e-3)


def test_gradients_of_tiles_err_at_most_twice_the_untiled_error():
    """In bf16, 100 tiles of a token: no further from fp64 than twice the one product of the untiled MLP."""
    truth = loss_and_gradients(llama(kernels=False, dtype=torch.float64))
    plain = loss_and_gradients(llama(kernels=False, dtype=torch.bfloat16))
    ours = loss_and_gradients(tiled(llama(kernels=False, dtype=torch.bfloat16), 1))
    for name in (name for name in truth if "mlp" in name):
        error = {which: float((got[name].double() - truth[name]).norm()) for which, got in
                 {"plain": plain, "ours": ours}.items()}  # fmt: skip
        assert error["ours"] <= 2 * error["plain"], name


def test_dropout_draws_the_same_masks_in_the_backward():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=64, n_positions=64, resid_pdrop=0.5, embd_pdrop=0.0, attn_pdrop=0.0
    )
    mlp = tiled(transformers.GPT2LMHeadModel(config).double().train(), 8).transformer.h[0].mlp
    x = torch.randn(1, 24, 16, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return mlp(x).sum()

    assert torch.autograd.gradcheck(run, (x,))
    out = run(x)
    after_forward = torch.get_rng_state()
    out.backward()
    assert torch.equal(torch.get_rng_state(), after_forward), "the backward moves the generator"


def test_adapters_on_frozen_weights_get_the_same_gradients():
    pytest.importorskip("peft")

    def adapted() -> Any:
        model = llama()
        torch.manual_seed(1)
        model = TECHNIQUES["lora"].model(model, Settings.of({"lora.rank": 2}), RunInfo())
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)
        return model

    want = loss_and_gradients(adapted())
    assert want.keys() > {"loss"} and all("lora" in name for name in want if name != "loss")
    assert_same(loss_and_gradients(tiled(adapted())), want)


def test_tiles_of_fsdp2_shards_keep_loss_and_gradients(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_gloo_available():
        pytest.skip("gloo is not built in")
    want = loss_and_gradients(llama())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        model = llama()
        TECHNIQUES["checkpointing-full"].model(model, Settings.of({"train.checkpointing": "full"}), RunInfo())
        tiled(model)
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        got = loss_and_gradients(model)
        assert_same({name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in got.items()}, want)
    finally:
        dist.destroy_process_group()


def peak_bytes(model: Any, tokens: int) -> int:
    meter = PeakMeter(CPU)
    meter.start(list(model.parameters()))
    loss_and_gradients(model, tokens)
    return meter.stop().step_bytes


def test_memory_does_not_grow_by_the_inner_activations():
    """Checkpointed, a tile of 64: what a further token takes is less than its inner activations alone."""

    def grown(tile_tokens: int) -> float:
        def of(tokens: int) -> int:
            model = llama(kernels=False, width=64)
            TECHNIQUES["checkpointing-full"].model(model, Settings.of({"train.checkpointing": "full"}), RunInfo())
            return peak_bytes(tiled(model, tile_tokens) if tile_tokens else model, tokens)

        return (of(1024) - of(512)) / (2 * 512)

    inner_bytes = 8 * 64 * 4
    assert grown(0) - grown(64) >= 2 * inner_bytes


def test_routed_experts_are_refused():
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, num_local_experts=2,
    )  # fmt: skip
    with pytest.raises(RecipeError, match="no dense MLP"):
        tiled(transformers.MixtralForCausalLM(config))


def test_other_models_and_evaluation_are_unchanged():
    ours, other = tiled(llama()), llama()
    assert all("forward" not in vars(mlp) or not isinstance(mlp.forward, tiling._Tiles)
               for mlp in tiling.dense_mlps(other))  # fmt: skip
    ids = torch.randint(0, 64, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(ids).logits, other.eval()(ids).logits)


@pytest.mark.gpu
def test_tiles_keep_loss_and_gradients_of_the_kernels():
    device = torch.device("cuda")
    want = loss_and_gradients(llama(device=device, width=256), 512)
    assert_same(loss_and_gradients(tiled(llama(device=device, width=256), 200), 512), want, rtol=1e-4, atol=1e-5)
