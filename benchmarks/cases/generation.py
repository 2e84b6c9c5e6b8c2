"""Measure how fast completions are written: transformers' `generate`, its continuous batching, and tigon's generator.

    python -m benchmarks generation --json RECORD    # on a GPU with 80 GB: about 2 minutes
    python -m benchmarks generation --tiny           # a small model, also without a GPU

The model has the shape of Qwen3-4B, random bf16 weights and LoRA of rank 16. Each of 8 prompts of 1,024 tokens gets 8
completions of 256 tokens, which nothing ends early. Two lines write 512 completions that end early. One has adapters in
fp32, under autocast. The peak is what a line allocates beside the model, and `left_gib` what it keeps afterwards. The
rollout's log-probabilities are compared with one forward pass over prompt and completion.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import tigon
from benchmarks.harness import Bench, Case
from tigon.models.decoding.generator import generate
from tigon.models.decoding.rows import MOST_ROWS, Limits
from tigon.models.decoding.sampling import Sampling
from tigon.models.loading.presets import PRESETS
from tigon.planner.gpus import GIB

# Its types are incomplete, and mypy checks this file.
transformers = importlib.import_module("transformers")

QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SIZES = (8, 8, 1024, 256)
"""Prompts, completions of each, tokens of a prompt and of a completion."""
TINY_SIZES = (2, 2, 12, 8)
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def qwen3_4b(bench: Bench) -> Any:
    """The model in bf16, without adapters."""
    shape = {**PRESETS["qwen3-8b"], **QWEN3_4B, "tie_word_embeddings": True}
    if bench.tiny:
        shape |= {**SMALL, "num_key_value_heads": 2, "vocab_size": 1024}
    config = transformers.CONFIG_MAPPING[shape.pop("model_type", "qwen3")](**shape)
    torch.manual_seed(0)
    with bench.device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def adapted(bench: Bench) -> Any:
    """The model with adapters that change it."""
    peft = importlib.import_module("peft")
    lora = peft.LoraConfig(r=16, target_modules="all-linear")
    model = peft.get_peft_model(qwen3_4b(bench), lora, autocast_adapter_dtype=False).to(bench.device, torch.bfloat16)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    return model.eval()


def written(bench: Bench, name: str, tokens: int, write: Callable[[], Any], *, warm_ups: int = 1) -> Any:
    """Time one call after `warm_ups`, and add its line."""
    for _ in range(warm_ups):
        write()
    bench.free()
    before = torch.cuda.memory_allocated() if bench.gpu else 0
    if bench.gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    result = write()
    if bench.gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    line: dict[str, Any] = {"writes": name, "tokens_per_s": round(tokens / seconds, 1), "seconds": round(seconds, 2)}
    if bench.gpu:
        line["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / GIB, 2)
        line["left_gib"] = round((torch.cuda.memory_allocated() - before) / GIB, 2)
    bench.add("measurements", line)
    return result


def difference(model: Any, prompt: list[int], tokens: list[int], logprobs: list[float]) -> torch.Tensor:
    """|log-probability of the rollout - that of one forward pass| of each token."""
    ids = torch.tensor([prompt + tokens], device=next(model.parameters()).device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    own = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return (own.cpu() - torch.tensor(logprobs)).abs()


def measure_refills(bench: Bench, model: Any, draw: torch.Generator) -> None:
    """Twice as many completions as rows, of which most end early: all at once, and in parts of as many as rows."""
    count, new_tokens = (6, 8) if bench.tiny else (2 * MOST_ROWS, 256)
    vocab = model.config.vocab_size
    prompts = [torch.randint(vocab, (128,), generator=draw).tolist() for _ in range(count)]
    limits = Limits(new_tokens=new_tokens, ends=tuple(range(vocab // 64)))  # random weights: 64 tokens on average
    half = count // 2

    def tokens_of(*parts: list[list[int]]) -> int:
        return sum(len(row) for part in parts for row in generate(model, part, limits, Sampling(seed=1)).tokens)

    for name, parts in (("at once", [prompts]), ("in two halves", [prompts[:half], prompts[half:]])):
        write = partial(tokens_of, *parts)
        written(bench, f"generator, {count} completions {name}", write(), write)


@torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
def measure_all(bench: Bench) -> None:
    n_prompts, per_prompt, prompt_tokens, new_tokens = TINY_SIZES if bench.tiny else SIZES
    bench.fields |= {"sizes": [n_prompts, per_prompt, prompt_tokens, new_tokens]}
    model = adapted(bench)
    draw = torch.Generator().manual_seed(1)
    vocab = model.config.vocab_size
    prompts = [torch.randint(vocab, (prompt_tokens,), generator=draw).tolist() for _ in range(n_prompts)]
    asked = [prompt for prompt in prompts for _ in range(per_prompt)]
    count = len(asked) * new_tokens

    def by_generator() -> Any:
        return generate(model, asked, Limits(new_tokens=new_tokens), Sampling(seed=1))

    written(bench, "generator, layers of transformers", count, by_generator)
    undo = tigon.patch(model)
    completions = written(bench, "generator, patched layers", count, by_generator)
    one = Limits(new_tokens=new_tokens)
    written(bench, "generator, patched layers, 1 row", new_tokens, lambda: generate(model, asked[:1], one, Sampling()))
    measure_refills(bench, model, draw)
    errors = torch.cat(
        [
            difference(model, asked[row], completions.tokens[row], completions.logprobs[row])
            for row in range(0, len(asked), per_prompt)
        ]
    )
    bench.add("differences", {"mean_nats": errors.mean().item(), "largest_nats": errors.max().item()})
    adapters = [weight for name, weight in model.named_parameters() if "lora_" in name]
    for weight in adapters:
        weight.data = weight.data.float()
    with torch.autocast(bench.device.type, torch.bfloat16):
        written(bench, "generator, patched layers, fp32 adapters under autocast", count, by_generator)
    for weight in adapters:
        weight.data = weight.data.bfloat16()
    config = transformers.GenerationConfig(max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0, **SAMPLED)
    inner = model.get_base_model()
    ids = torch.tensor(asked, device=bench.device)

    def by_transformers(rows: int) -> Any:
        few = ids[:rows]
        return model.generate(input_ids=few, attention_mask=torch.ones_like(few), generation_config=config)

    model.generate(input_ids=ids[:2, :8], attention_mask=torch.ones_like(ids[:2, :8]), max_new_tokens=2)
    written(bench, "transformers, patched layers", count, lambda: by_transformers(len(asked)), warm_ups=0)
    written(bench, "generator, patched layers, once more", count, by_generator)
    undo.undo()
    model.generate(input_ids=ids[:2, :8], attention_mask=torch.ones_like(ids[:2, :8]), max_new_tokens=2)
    written(bench, "transformers", count, lambda: by_transformers(len(asked)), warm_ups=0)
    written(bench, "transformers, 1 row", new_tokens, lambda: by_transformers(1), warm_ups=0)
    if bench.gpu:
        config.eos_token_id = -1
        share = transformers.ContinuousBatchingConfig(max_memory_percent=0.5)
        batched = {"generation_config": config, "continuous_batching_config": share, "progress_bar": False}
        try:
            written(bench, "continuous batching", count, lambda: inner.generate_batch(asked, **batched))
        except Exception as error:  # versions differ in what it needs
            bench.add("failed", {"writes": "continuous batching", "error": f"{type(error).__name__}: {error}"[:300]})


CASE = Case(measure=measure_all, packages=("peft",))
