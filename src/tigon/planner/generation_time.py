"""The time in which a run writes the completions of a step.

tigon's generator replays a CUDA graph for each token. A step of it takes the time of its kernels, which are short, and
of reading the weights and the keys and values of the tokens so far. The host limits the generator's first
passes and all passes of transformers' `generate`, because it calls the model's modules in Python. Two constants were
fitted to records on H200s, which `KERNEL_S` and `CALL_S` name.
"""

from __future__ import annotations

from dataclasses import replace

from tigon.models.decoding.rows import LEAST_GRAPH_STEPS, PROMPT_TOKENS, PROMPTS
from tigon.models.kv_cache import kv_widths, queries_per_key
from tigon.objectives.base import PlannedObjective
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request
from tigon.planner.simulate.generation import Completions
from tigon.planner.simulate.model_states import ModelWeights
from tigon.planner.simulate.roofline import COPY_SHARE, MATMUL_EFFICIENCY
from tigon.planner.trace.cache.step_tapes import step_tapes
from tigon.planner.trace.tape import FORWARD, SegmentCost
from tigon.techniques.precision import number_format

KERNEL_S = 3.5e-6
"""A short kernel of a CUDA graph, with the gap to the next. Fitted to three rows of tigon's generator in
benchmarks/results/nvidia-h200/post-training/generation.json; assumed for other GPUs."""
CALL_S = 15e-6
"""CPU time of an operator in a forward pass without gradients, with the Python code of transformers and PEFT around it.
Two steps of a 4B took 9.5 and 16 us per operator (benchmarks/results/nvidia-h200/post-training/grpo-step.json). GRPO of
a 1B on two H200s took 15 us under FSDP2 and 16 under ZeRO-3, beside imports of other processes (grpo-two-gpus.json).
Assumed for other hosts."""
PROBE_TOKENS = 64
"""Tokens of the pass whose operators are counted. Their number hardly depends on the tokens."""
KERNELS_OF_CACHE, KERNELS_OF_SAMPLING = 3, 30
"""The kernels that a decoding step launches beside a forward pass: per layer, and per token."""
LOGITS_PASSES = 8
"""How often sampling reads or writes the logits in fp32."""


def completions_s(completions: Completions, request: Request, gpu: Gpu, model: ModelWeights) -> float:
    """Seconds in which a GPU writes the completions of one optimizer step.

    Every completion has its full length. A GPU waits for the slowest of all GPUs, which writes as many tokens.
    """
    decoding = _Decoding(completions, request, gpu, model)
    gathered_s = completions.gathered_bytes * (1 - 1 / request.settings.sharding.gpus) / gpu.peer_bytes_s
    return gathered_s + (decoding.generator_s() if completions.by_generator else decoding.transformers_s())


class _Decoding:
    """The parts of the time of one GPU."""

    def __init__(self, completions: Completions, request: Request, gpu: Gpu, model: ModelWeights) -> None:
        self.completions, self.generation = completions, completions.generation
        self.request, self.gpu, self.model = request, gpu, model
        self.itemsize = number_format(request.settings).compute_dtype.itemsize
        self.read_bytes_s = gpu.copy_bytes_s * COPY_SHARE
        self.token_bytes = self.itemsize * sum(map(sum, kv_widths(request.config, 1)))
        """Keys and values of a token."""
        self.forward = _forward_cost(request, gpu)
        self.call_s = self.forward.host_calls * max(CALL_S, gpu.host_s)

    def generator_s(self) -> float:
        """Prompts once, and a graph for the tokens after the second."""
        generation, room = self.generation, self.completions.room
        rounds = -(-self.completions.samples // room.rows)
        prompts = -(-room.rows // generation.per_prompt)
        per_pass = max(1, min(PROMPTS, PROMPT_TOKENS // generation.prompt_tokens))
        passes = -(-prompts // per_pass)
        prompts_s = max(passes * self.call_s, self._products_s(prompts * generation.prompt_tokens))
        # One step runs before the capture, which costs the host as much. Later rounds have the graph.
        steps = generation.new_tokens - 1
        eager = steps if steps <= LEAST_GRAPH_STEPS else 1
        captures = 0 if eager == steps else 1
        cache = prompts * generation.prompt_tokens + room.rows * generation.new_tokens / 2
        weights_s = max(self._weight_bytes() / self.read_bytes_s, self._products_s(room.rows))
        moved = cache * self.token_bytes + self._logits_bytes(room.rows)
        replay_s = self._launches() * KERNEL_S + weights_s + moved / self.read_bytes_s
        eager_s = max(self.call_s, replay_s)
        first = prompts_s + (eager + captures) * eager_s + (steps - eager) * replay_s
        later = prompts_s + (steps * eager_s if eager == steps else steps * replay_s)
        return first + (rounds - 1) * later

    def transformers_s(self) -> float:
        """Each prompt for each completion, and for each token a pass whose cache grows by concatenation."""
        generation, samples = self.generation, self.completions.samples
        prompts_s = max(self.call_s, self._products_s(samples * generation.prompt_tokens))
        cache = samples * (generation.prompt_tokens + generation.new_tokens / 2) * self.token_bytes
        # Old and new cache, and what attention repeats for the queries that share keys, written and read.
        moved = cache * (2 + 2 * queries_per_key(self.request.config)) + self._logits_bytes(samples)
        token_s = max(self._weight_bytes() / self.read_bytes_s, self._products_s(samples)) + moved / self.read_bytes_s
        if self.completions.gathers_each_pass:
            gpus = self.request.settings.sharding.gpus
            token_s += self.itemsize * self.model.numel * (1 - 1 / gpus) / self.gpu.peer_bytes_s
        return prompts_s + (generation.new_tokens - 1) * max(self.call_s, token_s)

    def _weight_bytes(self) -> float:
        """Bytes of weights that a token reads. A row of untied embeddings is nothing."""
        head = self.model.lm_head_shape[0] * self.model.lm_head_shape[1]
        tied = not any(weight.numel == head and not weight.embedding for weight in self.model.weights)
        read = [weight for weight in self.model.weights if tied or not weight.embedding]
        return sum(min(weight.nbytes, weight.numel * self.itemsize) for weight in read)

    def _logits_bytes(self, rows: int) -> float:
        return rows * self.model.lm_head_shape[0] * (self.itemsize + 4 * LOGITS_PASSES)

    def _products_s(self, tokens: float) -> float:
        per_token = self.forward.flops / self.gpu.matmul_flops + self.forward.fp32_flops / self.gpu.fp32_flops
        if self.forward.fp8_flops:
            per_token += self.forward.fp8_flops / self.gpu.fp8_flops
        return tokens / PROBE_TOKENS * per_token / MATMUL_EFFICIENCY

    def _launches(self) -> int:
        """Kernels of a decoding step. Autocast casts trained matrices once for all steps, but adapters in each."""
        casts = 0
        if number_format(self.request.settings).autocast is not None and not self.request.settings.lora.used:
            casts = sum(len(weight.shape) == 2 for weight in self.model.trained)
        layers: int = self.request.config.get_text_config().num_hidden_layers
        return self.forward.launches - casts + layers * KERNELS_OF_CACHE + KERNELS_OF_SAMPLING


def _forward_cost(request: Request, gpu: Gpu) -> SegmentCost:
    """The work of one forward pass of the trained model over `PROBE_TOKENS` tokens."""
    plain = {"train.checkpointing": "none", "train.gradient_accumulation": 1, "train.cuda_graphs": False}
    probe = replace(
        request, batch=1, seq=PROBE_TOKENS, masked=False, objective=PlannedObjective(),
        settings=request.settings.having(plain),
    )  # fmt: skip
    cost = SegmentCost()
    for segment in step_tapes(probe, gpu, evaluating=False).micro_batches[0].segments:
        if segment.where.phase == FORWARD:
            cost.add(segment.cost)
    return cost
