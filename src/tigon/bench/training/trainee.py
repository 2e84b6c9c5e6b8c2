"""The weights, the optimizer and the data of a case, which all its variants share.

The starting weights are drawn again before every turn of a variant, so nothing of an earlier variant remains, and no
second copy of the weights is held.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tigon.bench.training.cases import WEIGHTS, Case
from tigon.bench.training.variants import Loss
from tigon.errors import UsageError
from tigon.models.kv_cache import without_cache
from tigon.models.loading.config import load_config
from tigon.planner.request import text_config

LEARNING_RATE, MAX_GRAD_NORM = 1e-5, 1.0
_WEIGHTS_SEED, _DATA_SEED = 0, 1


class Trainee:
    """A model with random weights on `device`, AdamW, and `steps` batches of random tokens."""

    def __init__(self, case: Case, device: torch.device, steps: int) -> None:
        import transformers

        self.case, self.device = case, device
        self.config = load_config(case.model)
        limit = getattr(text_config(self.config), "max_position_embeddings", None)
        if limit is not None and case.seq > limit:
            raise UsageError(f"--seq {case.seq} is more than {case.model}'s max_position_embeddings of {limit}.")
        with device:
            self.model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
                self.config, dtype=WEIGHTS[case.precision]
            )
        without_cache(self.model)
        self.model.train()
        self.parameters = list(self.model.parameters())
        self._constants = [_constant(parameter) for parameter in self.parameters]
        self._std = float(getattr(text_config(self.config), "initializer_range", None) or 0.02)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, fused=True)
        draw = torch.Generator().manual_seed(_DATA_SEED)
        vocabulary = text_config(self.config).vocab_size
        self.ids = torch.randint(0, vocabulary, (steps, case.batch, case.seq), generator=draw).to(device)
        self._learned = torch.tensor(case.batch * (case.seq - 1), device=device)

    def restore(self) -> None:
        """Draw the starting weights, clear the gradients and set the optimizer's state to 0."""
        draw = torch.Generator(self.device).manual_seed(_WEIGHTS_SEED)
        with torch.no_grad():
            for parameter, constant in zip(self.parameters, self._constants, strict=True):
                if constant is None:
                    parameter.normal_(0.0, self._std, generator=draw)
                else:
                    parameter.fill_(constant)
        self.optimizer.zero_grad()
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def step(self, loss: Loss, number: int, micro: int) -> Tensor:
        """One optimizer step on batch `number`, in micro-batches of `micro` samples. Returns the mean loss."""
        total = self.accumulate(loss, self.ids[number].split(micro))
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def accumulate(self, loss: Loss, micro_batches: tuple[Tensor, ...]) -> Tensor:
        """The forward and backward passes of the micro-batches. Returns the sum of their losses."""
        total = torch.zeros((), device=self.device)
        for ids in micro_batches:
            with self._autocast():
                share = loss(ids, self._learned)
            share.backward()
            total += share.detach()
        return total

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.case.precision == "amp-bf16"):
            yield

    def flops(self) -> int | None:
        """Floating-point operations of a step, without recomputation; None for a mixture of experts.

        A token costs 6 per weight of a matrix product. It costs 6 x sequence x width per attention layer, which is half
        of the whole matrix, because of the causal mask. A sliding window would need less.
        """
        text = text_config(self.config)
        embeddings = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Embedding)}
        heads = {id(m.weight): m.weight.numel() for m in self.model.modules() if isinstance(m, nn.Linear)}
        if any(parameter.ndim > 2 for parameter in self.parameters) or getattr(text, "num_local_experts", None):
            return None
        products = sum(p.numel() for p in self.parameters if p.ndim == 2 and id(p) not in embeddings)
        products += sum(size for key, size in heads.items() if key in embeddings)  # a tied head
        q_heads = text.num_attention_heads
        width = q_heads * (getattr(text, "head_dim", None) or math.ceil(text.hidden_size / q_heads))
        return int(6 * self.case.tokens * (products + text.num_hidden_layers * self.case.seq * width))


def _constant(parameter: Tensor) -> float | None:
    """The value of all elements if they are equal, as in norms and biases."""
    first = parameter.detach().flatten()[0]
    return float(first) if bool((parameter == first).all()) else None
