"""Loads a model as each library documents it, with its activation checkpointing, and runs the steps.

`run(row)` is called once per process, because Unsloth and Liger change transformers for the whole process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.duel import inputs, steps
from benchmarks.duel.entries import ENTRIES, LOOP, TASKS, Entry, Row, Task
from tigon.bench import record

PACKAGES = ("accelerate", "bitsandbytes", "peft", "torchao", "trl", "unsloth", "unsloth_zoo")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUTSIDE_GIB = 0.98
"""The most that a process with tensors on the host held outside PyTorch's allocator, of 12 on H100s and H200s
(docs/log/2026-11.md, "Memory outside the allocator"). It is not read from the GPU: other rows hold memory there too."""
Line = dict[str, Any]


def run(row: Row, tiny: bool) -> dict[str, Any]:
    """The line of the record for this row, and the environment."""
    task, entry = TASKS[row.task], ENTRIES[row.entry]
    start_s = time.monotonic()
    if entry.library == "unsloth":
        importlib.import_module("unsloth")  # before transformers, PEFT and TRL
    folder = inputs.folder_of(task.model, tiny)
    ids = inputs.tokens(row.batch, row.seq, inputs.config(task.model, tiny).vocab_size)
    line: Line = {"task": row.task, "entry": row.entry, "size": row.size}
    line |= _LIBRARIES[entry.library](task, entry, folder, ids, lambda model: _checked(line, model, task, start_s))
    return {"line": line, "environment": record.environment(torch.device(DEVICE), PACKAGES)}


def _checked(line: Line, model: Any, task: Task, start_s: float) -> None:
    """Fill the adapters and count what is trained.

    Raises:
        RuntimeError: the layers are in 4 bits and should not be, or the load fell back to 16 bits.
    """
    stored = sum(type(m).__name__ == "Linear4bit" for m in model.modules())
    if (stored >= model.config.num_hidden_layers * len(inputs.TARGETS)) != task.four_bit:
        raise RuntimeError(f"{stored} layers are stored in 4 bits, and the task has four_bit={task.four_bit}")
    line["adapters_filled"] = inputs.fill_adapters(model) if task.adapters else 0
    line["trained_parameters"] = sum(parameter.numel() for parameter in steps.trained(model))
    line["load_s"] = round(time.monotonic() - start_s, 1)


def _steps(
    model: Any, task: Task, entry: Entry, folder: Path, ids: torch.Tensor, *, autocast: bool, **for_trainer: Any
) -> Line:
    model.train()
    limit: Line = {}
    if entry.limit_gib is not None and DEVICE == "cuda":
        left_gib = entry.limit_gib - OUTSIDE_GIB
        torch.cuda.set_per_process_memory_fraction(left_gib * steps.GIB / torch.cuda.mem_get_info()[1])
        limit = {"limit_gib": entry.limit_gib, "allocator_limit_gib": round(left_gib, 2)}
    if entry.where == LOOP:
        line = steps.in_loop(model, ids, task.learning_rate, autocast)
    else:
        tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
        line = steps.in_trainer(model, tokenizer, ids, task.learning_rate, **for_trainer)
    return {**line, **limit, "trained_dtypes": steps.dtypes(model)}


def _loaded(task: Task, folder: Path) -> Any:
    """A model of transformers, with PEFT's adapters if the task has them."""
    transformers = importlib.import_module("transformers")
    quantised = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        device_map={"": 0 if DEVICE == "cuda" else "cpu"},
        **({"quantization_config": quantised} if task.four_bit else {}),
    )
    model.config.use_cache = False
    if not task.adapters:
        return model
    peft = importlib.import_module("peft")
    return peft.get_peft_model(
        model, peft.LoraConfig(r=inputs.RANK, lora_alpha=inputs.ALPHA, target_modules=[*inputs.TARGETS])
    )


def _hugging_face(task: Task, entry: Entry, folder: Path, ids: torch.Tensor, checked: Callable[[Any], None]) -> Line:
    model = _loaded(task, folder)
    checked(model)
    if entry.where == LOOP:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if task.adapters:
            model.enable_input_require_grads()
    return _steps(model, task, entry, folder, ids, autocast=task.adapters)


def _liger(task: Task, entry: Entry, folder: Path, ids: torch.Tensor, checked: Callable[[Any], None]) -> Line:
    importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
    return _hugging_face(task, entry, folder, ids, checked)


def _tigon(task: Task, entry: Entry, folder: Path, ids: torch.Tensor, checked: Callable[[Any], None]) -> Line:
    import tigon

    model = _loaded(task, folder)
    checked(model)
    if task.adapters:
        model.enable_input_require_grads()
    report = tigon.patch(model)
    line: Line = {"patched": dict(report.counts)}
    if entry.setting == "fp8":
        few = model.config.num_hidden_layers < 3  # of the tiny model
        line["in_fp8"] = dict(tigon.patch_fp8(model, bf16_layers=0 if few else 1).counts)
    choice: Any = entry.setting
    if entry.setting in ("auto", "fp8"):
        batch, seq = ids.shape
        memory = entry.memory or (None if DEVICE == "cuda" else "80GiB")
        start_s = time.monotonic()
        choice = tigon.plan(model, batch=batch, seq=seq, memory=memory, accumulate=1)
        line |= {
            "plan": choice.checkpointing,
            "plan_graphs": choice.cuda_graphs,
            "plan_s": round(time.monotonic() - start_s, 1),
            "planned_peak_gib": round(choice.peak_allocated_bytes / steps.GIB, 2),
            "planned_tokens_per_s": round(choice.tokens_per_s),
        }
    tigon.checkpoint(model, choice)

    def fuse(trainer: Any) -> None:
        fused = importlib.import_module("tigon.integrations.trl").fuse(trainer)
        line["fused"], line["unfused"] = list(fused.fused), {str(k): str(v) for k, v in fused.unfused.items()}

    measured = _steps(model, task, entry, folder, ids, autocast=task.adapters, built=fuse, gradient_checkpointing=False)
    return {**measured, **line}


def _unsloth(task: Task, entry: Entry, folder: Path, ids: torch.Tensor, checked: Callable[[Any], None]) -> Line:
    """Unsloth's own loader; its trainer is the SFTTrainer that TRL has after `import unsloth`."""
    fast = importlib.import_module("unsloth").FastLanguageModel
    checkpointing: Any = False if entry.setting == "none" else "unsloth"
    shared = {"max_seq_length": ids.shape[1], "use_gradient_checkpointing": checkpointing, "random_state": inputs.SEED}
    model, _ = fast.from_pretrained(
        str(folder),
        dtype=torch.bfloat16,
        load_in_4bit=task.four_bit,
        load_in_16bit=task.adapters and not task.four_bit,
        full_finetuning=not task.adapters,
        use_exact_model_name=True,
        **shared,
    )
    skipped = {"checkpoint_skip_layers": "auto"} if entry.setting == "auto" else {}
    if task.adapters:
        model = fast.get_peft_model(
            model,
            r=inputs.RANK,
            lora_alpha=inputs.ALPHA,
            lora_dropout=0,
            bias="none",
            target_modules=[*inputs.TARGETS],
            **shared,
            **skipped,
        )
    checked(model)
    if entry.where == LOOP:
        fast.for_training(model, use_gradient_checkpointing=checkpointing)
    has_xformers = bool(importlib.import_module("unsloth.utils.attention_dispatch").HAS_XFORMERS)
    if has_xformers != entry.xformers:
        raise RuntimeError(f"Unsloth uses xformers: {has_xformers}; the row asks for {entry.xformers}")
    line = _steps(model, task, entry, folder, ids, autocast=task.adapters)
    return {**line, "xformers": importlib.metadata.version("xformers") if has_xformers else None}


_LIBRARIES: dict[str, Callable[..., Line]] = {
    "hf": _hugging_face,
    "liger": _liger,
    "tigon": _tigon,
    "unsloth": _unsloth,
}
