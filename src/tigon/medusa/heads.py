"""The heads as modules. They hold weights; the losses run inside the modules' own forwards (`Visit`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon._trunk import decoder_layers, trunk_of
from tigon.errors import PatchError
from tigon.medusa.spec import HeadsSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# B batch, T positions, H hidden, V vocabulary, K heads.


@dataclass(frozen=True)
class Visit:
    """Passed to a module instead of an input: a function to run inside the module's forward.

    FSDP2 and ZeRO-3 gather a module's weights in its forward hooks. Code that needs the weights of several modules at
    once therefore runs inside the forwards of all of them.
    """

    run: Callable[[], Tensor]


def inside(modules: Sequence[nn.Module], run: Callable[[], Tensor]) -> Tensor:
    """Call `run()` inside the forwards of all `modules`, which must accept a `Visit`."""
    if not modules:
        return run()
    return modules[0](Visit(lambda: inside(modules[1:], run)))  # type: ignore[no-any-return]


class Linear(nn.Linear):
    """A linear module whose forward also accepts a `Visit`."""

    def forward(self, input: Tensor | Visit) -> Tensor:
        return input.run() if isinstance(input, Visit) else super().forward(input)


class ResidualBlocks(nn.Module):
    """x ← x + SiLU(W x + b), `layers` times; starts as the identity."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Linear(hidden, hidden) for _ in range(layers)])
        # The authors' trainer keeps nn.Linear's random biases. With biases of 0, a head starts equal to the lm_head.
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """Each block's weight and bias."""
        return [(linear.weight, linear.bias) for linear in self.layers]  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.layers:
            x = x + F.silu(linear(x))
        return x


class MedusaHeads(nn.Module):
    """K heads on one hidden state. Each has residual blocks, then its own output weight or the model's lm_head.

    Parameters have vLLM's names: `blocks.k.layers.i.{weight,bias}`, `lm_heads.k.weight`.
    """

    state: Any  # attach.HeadState

    def __init__(self, spec: HeadsSpec, head: nn.Linear) -> None:
        """head: the model's lm_head, from which the output weights start."""
        super().__init__()
        self.spec = spec
        vocab, hidden = head.weight.shape
        self.blocks = nn.ModuleList([ResidualBlocks(hidden, spec.layers) for _ in range(spec.count)])
        self.lm_heads = nn.ModuleList()
        for _ in range(0 if spec.shared else spec.count):
            own = Linear(hidden, vocab, bias=False)
            with torch.no_grad():
                own.weight.copy_(head.weight)
            self.lm_heads.append(own)

    def visited(self) -> list[nn.Module]:
        """The modules whose weights the loss uses."""
        return [m for m in self.modules() if isinstance(m, Linear)]

    def weights(self) -> list[Tensor] | None:
        """Each head's output weight; None if the heads share the model's."""
        return [own.weight for own in self.lm_heads] or None  # type: ignore[misc]

    def block_weights(self) -> list[list[tuple[Tensor, Tensor]]]:
        """The weights and biases of each head's blocks."""
        return [blocks.weights() for blocks in self.blocks]  # type: ignore[operator]

    def hiddens(
        self, model: PreTrainedModel, hidden_BTH: Tensor, inputs: Mapping[str, Any], layer_inputs: Mapping[str, Any]
    ) -> list[Tensor]:
        """The input of each head's blocks, which is the same tensor for all heads."""
        return [hidden_BTH] * self.spec.count

    def logits(self, hidden_NH: Tensor, head: nn.Module) -> Tensor:
        """(K, N, V) for decoding."""
        outputs = self.lm_heads or [head] * self.spec.count
        return torch.stack([out(blocks(hidden_NH)) for blocks, out in zip(self.blocks, outputs, strict=True)])


class MtpModule(nn.Module):
    """One multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437, eq. 21-23).

    It passes the hidden state of the previous depth and the embedding of the next token ahead through one transformer
    layer. The layer starts as a copy of the model's last one. Names are those of DeepSeek-V3's checkpoints.
    """

    def __init__(self, layer: nn.Module, norm: nn.Module, hidden: int, std: float) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        nn.init.normal_(self.eh_proj.weight, std=std)
        self.layer = copy.deepcopy(layer)

    def forward(self, hidden_BTH: Tensor, embedded_BTH: Tensor, layer_inputs: Mapping[str, Any]) -> Tensor:
        joined = torch.cat([self.enorm(embedded_BTH), self.hnorm(hidden_BTH)], dim=-1)
        output = self.layer(self.eh_proj(joined), **layer_inputs)
        return self.norm(output[0] if isinstance(output, tuple) else output)  # type: ignore[no-any-return]


class MtpHeads(nn.Module):
    """MTP modules in sequence, which use the model's embedding and lm_head."""

    state: Any  # attach.HeadState

    def __init__(self, spec: HeadsSpec, model: PreTrainedModel) -> None:
        super().__init__()
        self.spec = spec
        hidden = int(model.get_output_embeddings().weight.shape[1])
        std = float(getattr(model.config.get_text_config(), "initializer_range", 0.02))
        layer, norm = decoder_layers(model)[-1], final_norm(model)
        self.mtp = nn.ModuleList([MtpModule(layer, norm, hidden, std) for _ in range(spec.count)])

    def visited(self) -> list[nn.Module]:
        return []

    def weights(self) -> None:
        return None

    def block_weights(self) -> list[list[tuple[Tensor, Tensor]]]:
        return [[] for _ in range(self.spec.count)]

    def hiddens(
        self, model: PreTrainedModel, hidden_BTH: Tensor, inputs: Mapping[str, Any], layer_inputs: Mapping[str, Any]
    ) -> list[Tensor]:
        """The output of each depth, for the model's `input_ids` or `inputs_embeds`.

        If the token ahead lies past the end of the sequence, the last token replaces it. No position that sees it is
        scored.
        """
        ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
        given: Tensor = embeds if ids is None else ids  # type: ignore[assignment]  # the trunk requires one of the two
        outputs, T = [], given.shape[1]
        for depth, module in enumerate(self.mtp, start=1):
            ahead = given[:, torch.arange(depth, depth + T, device=given.device).clamp(max=T - 1)]
            embedded = ahead if ids is None else model.get_input_embeddings()(ahead)
            hidden_BTH = module(hidden_BTH, embedded, layer_inputs)
            outputs.append(hidden_BTH)
        return outputs


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm after the last layer: the last norm in the module that holds the list of layers."""
    layers = decoder_layers(model)

    def holds_layers(module: nn.Module) -> bool:
        return any(isinstance(child, nn.ModuleList) and list(child)[:1] == layers[:1] for child in module.children())

    holder = next(filter(holds_layers, trunk_of(model).modules()))
    norms = [child for name, child in holder.named_children() if "norm" in name or name == "ln_f"]
    if not norms:
        raise PatchError(f"{type(model).__name__} has no norm after its layers, which MTP modules need; use medusa.")
    norm: nn.Module = norms[-1]
    return norm


def make_heads(spec: HeadsSpec, model: PreTrainedModel) -> MedusaHeads | MtpHeads:
    """New heads for a model, on its device and in its dtype."""
    head = model.get_output_embeddings()
    with torch.device(head.weight.device):  # a meta model gets meta heads
        made = MtpHeads(spec, model) if spec.kind == "mtp" else MedusaHeads(spec, head)
    return made.to(dtype=head.weight.dtype)
