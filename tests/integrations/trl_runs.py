"""Small TRL runs: each trainer on a model of two layers and a vocabulary of 64, with and without tigon's head."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import tigon.integrations.trl as integration

VOCAB = 64
FUSED_FORWARD_SINCE = (1, 15)
"""The first TRL whose trainers give the model a forward with log-probabilities. Earlier ones read the logits."""


def trl_version() -> tuple[int, ...]:
    """The installed TRL's, e.g. (1, 16); (0, 0) without TRL."""
    try:
        return tuple(int(part) for part in importlib.metadata.version("trl").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return (0, 0)


def _interpret_trls_kernels() -> None:
    """TRL 1.15 launches its Triton kernels on a CPU too. Imported like this, they run in Triton's interpreter."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        importlib.import_module("triton.experimental.gluon")  # the interpreter imports it later, without the variable
        importlib.import_module("trl.kernels.chunked_divergence")
        importlib.import_module("trl.kernels.logprob_entropy")


if trl_version() == (1, 15):
    _interpret_trls_kernels()
CHAT = (
    "{% for m in messages %}{{ 'w4 ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' w2 ' }}"
    "{% endgeneration %}{% else %}{{ m.content + ' w3 ' }}{% endif %}{% endfor %}"
)


def tokenizer(words: int = VOCAB) -> Any:
    """One word per token; built here, so that no test needs a download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words_ = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    words_.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words_, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w0", padding_side="left"
    )
    made.chat_template = CHAT
    return made


def model(family: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A causal language model of two layers in fp32, the same weights for the same seed."""
    from transformers import AutoModelForCausalLM

    folder = saved_model(family, seed, tuple(sorted(overrides.items())))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


@functools.cache
def saved_model(family: str, seed: int, overrides: tuple[tuple[str, Any], ...]) -> str:
    """The folder of such a model. TRL loads its reference model from the policy's folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **{**sizes, **dict(overrides)})
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = 2, 0
    folder = tempfile.mkdtemp()
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def scorer(**loading: Any) -> Any:
    """A model with one score per sequence."""
    from transformers import AutoModelForSequenceClassification

    folder = model(**(IN_BLOCKS if loading else {})).name_or_path
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **loading)


IN_BLOCKS = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
"""bitsandbytes 0.50.2 dequantises rows on a CPU rightly only if their length is a multiple of its block of 64."""


def four_bits(dtype: torch.dtype, *, scores: bool = False) -> Any:
    """A model whose linear layers are stored in NF4 and computed in `dtype`, as a script of QLoRA loads it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    loading = {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        ),
        "dtype": dtype,
    }
    torch.manual_seed(3)  # a new score layer
    folder = model(**IN_BLOCKS).name_or_path
    made = scorer(**loading) if scores else AutoModelForCausalLM.from_pretrained(folder, **loading)
    for module in made.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # repacked for bf16 instructions they cannot be trained
            module.support_avx512bf16_for_cpu = False
    return made


def text(length: int, generator: torch.Generator) -> str:
    return " ".join(f"w{i}" for i in torch.randint(5, VOCAB, (length,), generator=generator).tolist())


def examples(kind: str, count: int = 8) -> Any:
    """A data set in TRL's format: sft, chat, plain, preference, unpaired or prompt."""
    import datasets

    generator = torch.Generator().manual_seed(0)

    def length(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    rows: list[dict[str, Any]] = []
    for i in range(count):
        prompt, good, bad = (text(length(*span), generator) for span in ((2, 6), (3, 9), (2, 8)))
        good, bad = f" {good}", f" {bad}"
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": good.strip()}]
        rows.append(
            {
                "sft": {"prompt": prompt, "completion": good},
                "chat": {"messages": turns},
                "preference": {"prompt": prompt, "chosen": good, "rejected": bad},
                "unpaired": {"prompt": prompt, "completion": good, "label": i % 3 > 0},
                "unpaired of one prompt": {"prompt": "w7 w8 w9", "completion": good, "label": i % 3 > 0},
                "prompt": {"prompt": prompt},
                "plain": {"text": prompt + good},
            }[kind]
        )
    return datasets.Dataset.from_list(rows)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) + 0.1 * len(completion.split()) for completion in completions]


@dataclass(frozen=True)
class Kind:
    """How one trainer of TRL is built."""

    trainer: str
    config: str
    data: str
    package: str = "trl"
    options: dict[str, Any] = field(default_factory=dict)
    parts: Callable[[], dict[str, Any]] = dict
    """Further arguments of the trainer, such as a teacher."""


SHORT = {"max_length": 24}
GENERATES = {
    "num_generations": 2, "max_completion_length": 6, "steps_per_generation": 1, "temperature": 0.9, "beta": 0.05,
    "per_device_train_batch_size": 4,
}  # fmt: skip

KINDS = {
    "SFT": Kind("SFTTrainer", "SFTConfig", "sft", options=SHORT),
    "DPO": Kind("DPOTrainer", "DPOConfig", "preference", options=SHORT),
    "KTO": Kind("KTOTrainer", "KTOConfig", "unpaired", options=SHORT),
    "GRPO": Kind("GRPOTrainer", "GRPOConfig", "prompt", options=GENERATES, parts=lambda: {"reward_funcs": reward}),
    "RLOO": Kind("RLOOTrainer", "RLOOConfig", "prompt", options=GENERATES, parts=lambda: {"reward_funcs": reward}),
    "ORPO": Kind("ORPOTrainer", "ORPOConfig", "preference", "trl.experimental.orpo", options=SHORT),
    "CPO": Kind("CPOTrainer", "CPOConfig", "preference", "trl.experimental.cpo", options=SHORT),
    "GKD": Kind(
        "GKDTrainer", "GKDConfig", "chat", "trl.experimental.gkd",
        options={"max_length": 24, "lmbda": 0.0, "max_new_tokens": 4},
        parts=lambda: {"teacher_model": model(seed=1, hidden_size=48)},
    ),
    "Distillation": Kind(
        "DistillationTrainer", "DistillationConfig", "prompt", options={"max_completion_length": 6},
        parts=lambda: {"teacher_model": model(seed=1, hidden_size=48)},
    ),
    "Reward": Kind("RewardTrainer", "RewardConfig", "preference", options={**SHORT, "policy": lambda: scorer()}),
}  # fmt: skip

TIMES = ("time", "runtime", "per_second", "flos", "epoch")


@dataclass
class Result:
    """What one run logged, its gradients per optimizer step, and what `fuse` replaced."""

    logs: list[dict[str, float]]
    grads: list[dict[str, torch.Tensor]]
    fused: list[str]
    unfused: dict[str, str]
    shared: Any = None
    """The tokens that shared prefixes left out."""


def build(
    kind: str, *, policy: Callable[[], Any] | None = None, lora: Any = None, data: str | None = None,
    evaluate: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """The trainer of one row of KINDS with these options of its config."""
    row = KINDS[kind]
    package = importlib.import_module(row.package)
    if kind == "Distillation" and not hasattr(package, row.trainer):  # TRL 1.8
        row = replace(row, data="chat")
        package = importlib.import_module("trl.experimental.distillation")
    preset = dict(row.options)
    usual = preset.pop("policy", model)
    policy = policy or usual
    arguments = {
        "output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False, "max_steps": 2, "seed": 5,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "learning_rate": 0.1, "optim": "sgd",
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "gradient_checkpointing": False, "dataloader_pin_memory": False, **preset, **options,
    }  # fmt: skip
    more = row.parts()
    if lora is not None:
        more["peft_config"] = lora()
    if evaluate:
        more["eval_dataset"] = examples(data or row.data, 4)
    return getattr(package, row.trainer)(
        model=policy(), args=getattr(package, row.config)(**arguments), train_dataset=examples(data or row.data),
        processing_class=tokenizer(), **more,
    )  # fmt: skip


def watch_gradients(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """The list that every optimizer step appends its gradients to."""
    from transformers import TrainerCallback

    taken: list[dict[str, torch.Tensor]] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
            taken.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    trainer.add_callback(Watch())
    return taken


def train(
    kind: str, *, fused: bool, before: Callable[[Any], None] | None = None, shared_prefix: bool = False, **options: Any
) -> Result:
    """Build, fuse if asked, train two steps, evaluate if asked."""
    evaluate = options.get("evaluate", False)
    torch.manual_seed(7)
    trainer = build(kind, **options)
    if before is not None:
        before(trainer)
    report = integration.fuse(trainer, shared_prefix=shared_prefix) if fused else None
    grads = watch_gradients(trainer)
    torch.manual_seed(11)
    trainer.train()
    if evaluate:
        trainer.evaluate()
    logs = [
        {key: value for key, value in entry.items() if isinstance(value, float | int) and not of_time(key)}
        for entry in trainer.state.log_history
    ]
    assert grads, "no optimizer step ran"
    shared = report.shared_prompts.counts if report and report.shared_prompts else None
    return Result(logs, grads, report.fused if report else [], report.unfused if report else {}, shared)


def compare(got: Result, want: Result, tolerance: float) -> None:
    """Fail unless two runs logged the same numbers and had the same gradients."""
    assert len(got.logs) == len(want.logs)
    for ours, theirs in zip(got.logs, want.logs, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance / 10, nan_ok=True)
    assert len(got.grads) == len(want.grads)
    for ours, theirs in zip(got.grads, want.grads, strict=True):
        assert ours.keys() == theirs.keys()
        largest = max(float(grad.abs().max()) for grad in theirs.values())
        for name, grad in theirs.items():
            error = float((ours[name] - grad).abs().max())
            # Losses of opposite signs cancel in a gradient, so its error is larger than that of the logged numbers.
            assert error <= 10 * tolerance * max(float(grad.abs().max()), largest / 100), (name, error)


def of_time(key: str) -> bool:
    """Whether a logged number is a time, or otherwise differs between two equal runs."""
    return any(word in key for word in TIMES)
