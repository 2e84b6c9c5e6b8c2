"""Small random models, batches, and the comparison of a patched model with its unpatched twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from tigon.models import MODELS
from tigon.models.verification.tiny import tiny_model

VOCAB = 97  # of tiny_model too
# Rows with a plain head, and with heads whose output the model caps, divides and multiplies; the second and the fourth
# are tied.
HEADS = ("llama", "gemma2", "granite", "cohere")

# Families whose code in releases before the given one is another: patch refuses them, or leaves their loss alone.
# 5.12.1 is too old for the first two, and 5.15.1 for the third.
FITS_FROM = {"granitemoe": "5.15", "gpt_neox": "5.15", "gemma3": "5.17"}


def too_old(release: str) -> bool:
    """Whether the installed transformers is older than this release."""
    import transformers

    return Version(transformers.__version__) < Version(release)


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "sdpa",
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# What differs between Llama 2 and 3.2.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": {},
    "grouped-query": {"num_key_value_heads": 2},
    "tied-llama3-rope": {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide-heads-eager": {"head_dim": 16, "attn_implementation": "eager"},
    "yarn-rope": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    "dynamic-rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
}


def llama(name: str = "grouped-query", dtype: torch.dtype = torch.float32, **overrides: Any) -> nn.Module:
    """A LlamaForCausalLM in training mode; the same weights at every call with the same arguments."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **CONFIGS[name], **overrides}))
    # Norm weights start at 1 and biases at 0, where mistakes hide.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).train()


def batch(rows: int = 2, tokens: int = 19, *, seed: int = 1) -> dict[str, Tensor]:
    """input_ids and labels (rows, tokens), the first third of row 0 masked as a prompt would be."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB, (rows, tokens), generator=generator)
    labels = input_ids.clone()
    labels[0, : tokens // 3] = -100
    return {"input_ids": input_ids, "labels": labels}


Run = Callable[[nn.Module], Tensor]


def call(**inputs: Any) -> Run:
    """A run that calls the model once and returns its loss."""
    return lambda model: model(**inputs).loss


def loss_and_gradients(model: nn.Module, run: Run) -> dict[str, Tensor]:
    """loss, then the gradient of every parameter that has one."""
    model.zero_grad(set_to_none=True)
    loss = run(model)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def relative_errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative Frobenius error of each tensor. Raises where the sets of gradients differ."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    errors = {}
    for name, expected in want.items():
        wide = expected.double()
        errors[name] = ((got[name].double() - wide).norm() / wide.norm().clamp_min(1e-12)).item()
    return errors


def assert_close(
    got: dict[str, Tensor], want: dict[str, Tensor], limit: float = 1e-5,
    exact: Callable[[], dict[str, Tensor]] | None = None,
) -> None:  # fmt: skip
    """`got` equals `want` up to `limit`, or up to the rounding of `want` itself if `exact` computes it in fp64.

    The gradient of a key's bias is a sum that almost cancels. Its rounding depends on the CPU, so no number is a limit.
    A result that obeys the rule of twice the error differs from `want` by at most three times the error of `want`.
    """
    errors = {name: error for name, error in relative_errors(got, want).items() if not error <= limit}
    if errors and exact is not None:
        rounding = relative_errors(want, exact())
        errors = {name: error for name, error in errors.items() if not error <= 3 * rounding[name]}
    assert not errors, errors


def twins(name: str = "grouped-query", **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model twice, a Llama of `CONFIGS` or the model of a row; patch one of them."""
    model = tiny_model(name, {**MODELS[name].tiny, **options}) if name in MODELS else llama(name, **options)
    return copy.deepcopy(model), model


def assert_agree(got: dict[str, Tensor], want: dict[str, Tensor], limit: float = 1e-4) -> None:
    """The same tensors, each with a relative error of at most `limit`."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        error = (got[name] - value).norm() / value.norm().clamp_min(1e-12)
        assert error <= limit, f"{name}: relative error {error:.1e}"
