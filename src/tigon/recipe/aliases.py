"""Names that other libraries give to recipe keys. A recipe may use them in the key's section or at the top level. Names
that the libraries share with tigon may stand at the top level too.

The values are tigon's, except where a row translates them. A row is left out if the other library's key has another
meaning: `output_dir` is one run's folder, and `output.folder` holds many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tigon.errors import RecipeError

HF, PEFT, TRL, AXOLOTL = "TrainingArguments", "PEFT", "TRL", "Axolotl"


@dataclass(frozen=True)
class Alias:
    """One name of another library."""

    name: str
    key: str
    """The recipe key, as section.name."""
    of: str
    """The library."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """The library's values -> the recipe key's; other values are the recipe key's already."""
    only: bool = False
    """Whether a value that `values` lacks is refused."""


_OPTIMIZERS = {
    "adamw_torch": "adamw-foreach", "adamw_torch_fused": "adamw", "adamw_8bit": "adamw-8bit",
    "adamw_bnb_8bit": "adamw-8bit", "paged_adamw_32bit": "paged-adamw", "paged_adamw_8bit": "paged-adamw-8bit",
    "lion_8bit": "lion-8bit", "ademamix_8bit": "ademamix-8bit", "paged_ademamix_32bit": "paged-ademamix",
    "paged_ademamix_8bit": "paged-ademamix-8bit", "schedule_free_adamw": "schedule-free",
}  # fmt: skip
_SWITCH = {True: "full", False: "none"}
_ANSWERS = {True: "answers", False: "all"}

ALIASES: Mapping[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias("model_name_or_path", "model.name", TRL),
        Alias("attn_implementation", "model.attention", TRL),
        Alias("model_revision", "model.revision", TRL),
        Alias("dataset_name", "data.source", TRL),
        Alias("dataset_config", "data.subset", TRL),
        Alias("dataset_train_split", "data.split", TRL),
        Alias("dataset_streaming", "data.streaming", TRL),
        Alias("assistant_only_loss", "data.learn", TRL, _ANSWERS, only=True),
        Alias("completion_only_loss", "data.learn", TRL, _ANSWERS, only=True),
        Alias("max_length", "data.sequence_length", TRL),
        Alias("max_seq_length", "data.sequence_length", TRL),
        Alias("num_train_epochs", "train.epochs", HF),
        Alias("max_steps", "train.steps", HF),
        Alias("per_device_train_batch_size", "train.batch_size", HF),
        Alias("gradient_accumulation_steps", "train.gradient_accumulation", HF),
        Alias("lr_scheduler_type", "train.schedule", HF),
        Alias("optim", "train.optimizer", HF, _OPTIMIZERS),
        Alias("bf16", "train.precision", HF, {True: "amp-bf16"}, only=True),
        Alias("fp16", "train.precision", HF, {True: "amp-fp16"}, only=True),
        Alias("gradient_checkpointing", "train.checkpointing", HF, _SWITCH, only=True),
        Alias("logging_steps", "train.log_steps", HF),
        Alias("save_total_limit", "train.keep_checkpoints", HF),
        Alias("load_best_model_at_end", "train.load_best", HF),
        Alias("dataloader_num_workers", "train.workers", HF),
        Alias("run_name", "output.name", HF),
        Alias("r", "lora.rank", PEFT),
        Alias("lora_alpha", "lora.alpha", PEFT),
        Alias("target_modules", "lora.targets", PEFT),
        Alias("lora_dropout", "lora.dropout", PEFT),
        Alias("use_rslora", "lora.rslora", PEFT),
        Alias("use_dora", "lora.dora", PEFT),
        Alias("init_lora_weights", "lora.init", PEFT, {True: "default"}),
        Alias("num_generations", "post_training.generations", TRL),
        Alias("max_completion_length", "post_training.completion_length", TRL),
        Alias("base_model", "model.name", AXOLOTL),
        Alias("sequence_len", "data.sequence_length", AXOLOTL),
        Alias("sample_packing", "data.packing", AXOLOTL),
        Alias("val_set_size", "data.eval_fraction", AXOLOTL),
        Alias("micro_batch_size", "train.batch_size", AXOLOTL),
        Alias("num_epochs", "train.epochs", AXOLOTL),
        Alias("lora_r", "lora.rank", AXOLOTL),
        Alias("lora_target_modules", "lora.targets", AXOLOTL),
        Alias("lora_modules_to_save", "lora.modules_to_save", AXOLOTL),
        Alias("lr_scheduler", "train.schedule", AXOLOTL),
        Alias("cosine_min_lr_ratio", "train.min_lr_rate", AXOLOTL),
        Alias("load_in_4bit", "lora.quantize", AXOLOTL),
        Alias("layer_offloading", "lora.base_offload", AXOLOTL),
    )
}


_SHARED: Mapping[str, str] = {
    "train": "learning_rate weight_decay warmup_steps max_grad_norm adam_beta1 adam_beta2 seed tf32 eval_steps "
    "save_steps report_to early_stopping_patience",
    "lora": "modules_to_save bias loraplus_lr_ratio",
    "model": "trust_remote_code",
    "data": "packing",
    "post_training": "beta loss_type label_smoothing temperature",
}
SHARED: Mapping[str, str] = {name: f"{section}.{name}" for section, names in _SHARED.items() for name in names.split()}
"""Names that other libraries share with tigon -> the recipe key. They may stand at the top level, like aliases."""


INSTEAD: Mapping[str, str] = {
    "warmup_ratio": "train.warmup_steps, a number of steps",
    "eval_strategy": "train.eval_steps",
    "save_strategy": "train.save_steps",
    "logging_strategy": "train.log_steps",
    "per_device_eval_batch_size": "train.batch_size, which evaluations use too",
    "eval_batch_size": "train.batch_size, which evaluations use too",
    "output_dir": "output.folder and output.name",
    "push_to_hub": "tigon export RUN FOLDER --push owner/name after the run",
    "hub_model_id": "tigon export RUN FOLDER --push owner/name after the run",
    "resume_from_checkpoint": "tigon train RECIPE --resume",
    "torch_dtype": "train.precision",
    "dtype": "train.precision for training, or output.dtype for the saved weights",
    "use_liger_kernel": "model.kernels",
    "deepspeed": "sharding.zero",
    "use_peft": "lora.rank",
    "adapter": "lora.rank, and lora.quantize: true for QLoRA",
    "load_in_8bit": "lora.quantize: true with lora.quantize_to: int8",
    "datasets": "data.source",
    "dataset_text_field": "data.columns: {text: NAME}",
    "max_prompt_length": "data.sequence_length, the tokens of prompt and answer together",
    "chat_template": "data.template",
    "rl": "train.objective",
    "activation_offloading": "train.checkpointing: offload",
    "tiled_mlp": "train.mlp_tile_tokens",
    "qlora": "lora.rank with lora.quantize: true",
    "torch_compile": "model.kernels; runs are not compiled",
    "compile": "model.kernels; runs are not compiled",
    "ref_model": "model.name, whose weights before training are the reference",
    "train.loss": "train.objective, or post_training.loss_type",
    "data.eval": "data.eval_source for files, or data.eval_fraction for a share of data.source",
    "output.dir": "output.folder and output.name",
    "output.path": "output.folder and output.name",
    "save_dir": "output.folder and output.name",
    "out_dir": "output.folder and output.name",
}
"""Names of other libraries that no recipe key equals -> what to use. A name with a section counts only there."""


_WORDS: Mapping[str, str] = {
    "model.name": "model.path model.id model.model model.base model.checkpoint model_name model_id model_path",
    "data.source": "data.path data.file data.files data.train data.dataset dataset dataset_path data_path data_file "
    "data_files train_file train_data train_dataset",
    "data.eval_source": "eval_file eval_data eval_dataset validation_file val_file data.validation",
    "data.eval_fraction": "val_size test_size validation_split val_split eval_split",
    "data.sequence_length": "seq_len seqlen seq_length max_seq_len max_len context_length block_size cutoff_len "
    "model_max_length",
    "data.packing": "pack",
    "data.template": "prompt_template",
    "train.learning_rate": "lr base_lr max_lr peak_lr",
    "train.steps": "num_steps total_steps n_steps num_training_steps iterations max_iters",
    "train.epochs": "epoch max_epochs n_epochs",
    "train.batch_size": "bs batch mbs micro_batch train_batch_size per_device_batch_size per_gpu_train_batch_size",
    "train.gradient_accumulation": "grad_accum accumulation_steps accumulate_grad_batches grad_acc_steps",
    "train.warmup_steps": "warmup num_warmup_steps",
    "train.weight_decay": "wd",
    "train.max_grad_norm": "grad_clip clip_grad_norm gradient_clip gradient_clipping gradient_clip_val",
    "train.schedule": "scheduler lr_schedule",
    "train.precision": "mixed_precision amp",
    "train.checkpointing": "recompute activation_checkpointing grad_checkpointing",
    "train.log_steps": "log_every log_interval",
    "train.save_steps": "save_every save_interval checkpoint_every checkpoint_interval",
    "train.eval_steps": "eval_every eval_interval",
    "train.seed": "random_seed",
    "train.early_stopping_patience": "patience early_stopping",
    "train.workers": "num_workers",
    "lora.rank": "train.lora lora.enabled",
    "lora.targets": "lora.modules target",
    "lora.quantize": "4bit load_4bit use_4bit",
    "sharding.gpus": "n_gpus num_gpus ngpu nproc_per_node devices",
    "post_training.rewards": "reward_funcs reward_function reward_fn reward_func reward_weights",
    "post_training.environment": "environment_factory",
    "post_training.beta": "dpo_beta kl_coef",
}
WORDS: Mapping[str, str] = {word: key for key, words in _WORDS.items() for word in words.split()}
"""Words that people try first -> the recipe key, which the error offers. They are not accepted, because a word may mean
two keys. A word with a section counts only there."""


def instead_of(dotted: str) -> str | None:
    """What to use instead of a name that is no recipe key; None if no table has it."""
    name = dotted.rpartition(".")[2]
    for word in (dotted, name):
        if found := INSTEAD.get(word) or WORDS.get(word):
            return found
    alias = ALIASES.get(name)  # in another section than its key's
    return alias.key if alias is not None else None


def key_of(dotted: str) -> str:
    """The recipe key that `name` or `section.name` stands for; `dotted` itself if it is not an alias."""
    section, _, name = dotted.rpartition(".")
    if not section and name in SHARED:
        return SHARED[name]
    alias = ALIASES.get(name)
    return alias.key if alias is not None and section in ("", alias.key.partition(".")[0]) else dotted


def value_of(name: str, value: Any, where: str) -> Any:
    """The recipe key's value for an alias's value.

    Raises:
        RecipeError: a value that has no counterpart. The message begins with `where`.
    """
    if name in SHARED:
        return value
    alias = ALIASES[name]
    known = isinstance(value, (str, bool)) and value in alias.values
    if not known and alias.only:
        accepted = " or ".join(str(choice).lower() for choice in alias.values)
        raise RecipeError(f"{where}: {name} is {value!r}, but can only be {accepted}; write {alias.key} instead")
    return alias.values[value] if known else value


def translate(
    block: Mapping[Any, Any], prefix: str, lines: dict[str, int], where: Callable[[str], str]
) -> dict[Any, Any]:
    """A recipe's mapping, or its `on_gpu`, with aliases replaced by recipe keys.

    Args:
        block: section -> keys, and aliases at the top level.
        prefix: "" or "on_gpu.".
        lines: dotted name -> line in the file. The recipe keys get their aliases' lines.
        where: the place of a dotted name, for messages.

    Raises:
        RecipeError: a key is given twice, or an alias's value has no counterpart.
    """
    result: dict[Any, Any] = {}
    given: dict[str, str] = {}

    def take(dotted: str, written: str, value: object) -> None:
        section, _, name = dotted.partition(".")
        if dotted in given:
            raise RecipeError(
                f"{where(prefix + written)}: {given[dotted]} and {written} are the same key; keep one of them"
            )
        given[dotted] = written
        result.setdefault(section, {})[name] = value
        if written != dotted and prefix + written in lines:
            lines.setdefault(prefix + dotted, lines[prefix + written])

    for top, value in block.items():
        if top in ALIASES or top in SHARED:
            take(key_of(top), top, value_of(top, value, where(prefix + top)))
        elif not isinstance(value, dict):
            result[top] = value
        else:
            result.setdefault(top, {})
            for name, inner in value.items():
                written = f"{top}.{name}"
                key = key_of(written)
                if key != written:
                    inner = value_of(name, inner, where(prefix + written))
                take(key, written, inner)
    return result
