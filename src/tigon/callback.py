"""`TigonCallback`: tigon in the Hugging Face Trainer and the trainers built on it, as one callback.

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[TigonCallback(sequence_length=2048)])
    trainer.train()

It patches the model when the Trainer is built, and plans the run when the training begins. Every record of the log
holds the measured peak beside the planned one. At the end of the training the patch is undone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tigon.errors import PatchError, TigonError
from tigon.integrations.trl.layers import is_matched
from tigon.models import PatchReport, patch
from tigon.models.fp8 import fp8_options
from tigon.models.patch import unwrap
from tigon.planner.estimate import Estimate, estimate
from tigon.planner.gpus import GIB, Gpu, find_gpu
from tigon.planner.request import Request
from tigon.recipe.aliases import ALIASES
from tigon.techniques.keys.settings import Settings
from tigon.trainer.guards.prediction import gpu_here

LOG = logging.getLogger(__name__)
PEAK, PLANNED = "tigon_peak_gib", "tigon_planned_peak_gib"
"""Names in the Trainer's logs."""


FUSE = (
    "the callback patches the trained model alone. Its reference or teacher rounds otherwise: in bf16 rewards and KL "
    "are not 0 before the first step. Call tigon.integrations.trl.fuse(trainer) before trainer.train()"
)


def compares_models(args: TrainingArguments, model: PreTrainedModel) -> bool:
    """Whether a trainer of TRL with these arguments has a reference or a teacher beside the trained model."""
    has_teacher = any(name.startswith("teacher_model") for name in vars(args))
    has_reference = hasattr(args, "sync_ref_model") and getattr(args, "beta", 0) != 0
    return has_teacher or (has_reference and not hasattr(model, "peft_config"))


class NotPlanned(TigonError):
    """The planner does not know an option of this run."""


class TigonCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not checked
    """Patches, plans and measures a run of the Hugging Face Trainer, and undoes the patch at its end.

    Args:
        sequence_length: tokens per sample, for the plan. None: `args.max_length` if the Trainer's arguments have it (as
            TRL's SFTConfig), otherwise the run is not planned.
        gpu: a name or size as for `tigon plan --gpu`. None: the GPU of this process; on a CPU the run is not planned.
        masked: whether batches are padded, so that attention gets a mask.
        flags: flags of `tigon.patch`, such as `rope=False`.
    """

    def __init__(
        self, *, sequence_length: int | None = None, gpu: str | None = None, masked: bool = False, **flags: bool | None
    ) -> None:
        self.sequence_length, self.gpu, self.masked, self.flags = sequence_length, gpu, masked, flags
        self.report: PatchReport | None = None
        """The report of the patch; None before the Trainer is built and after the patch is undone."""
        self.plan: Estimate | None = None
        self.unplanned: str | None = None
        """The reason if there is nothing planned."""
        self.peak_bytes: int | None = None
        """The most memory that PyTorch had allocated on the GPU; None on a CPU."""

    def on_init_end(
        self, args: object, state: object, control: object, model: PreTrainedModel = None, **kwargs: object
    ) -> None:
        """Patch the model before the Trainer wraps it."""
        if model is not None and self.report is None:
            self.report = patch(model, **self.flags)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel = None,
        **kwargs: object,
    ) -> None:
        """Patch, if the callback was added to a finished Trainer, and plan."""
        self.on_init_end(args, state, control, model)
        self.plan = self.unplanned = self.peak_bytes = None
        try:
            self.plan = self._planned(args, unwrap(model))
        except TigonError as reason:
            self.unplanned = str(reason)
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)
        if state.is_world_process_zero:
            planned = f"planned peak {self.plan.peak_allocated_bytes / GIB:.2f} GiB" if self.plan else self.unplanned
            LOG.warning("tigon: %s", planned)  # transformers shows warnings by default
            if compares_models(args, model) and not is_matched(model):
                LOG.warning("tigon: %s", FUSE)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: object,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Add the measured and the planned peak to this record."""
        if args.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(args.device)
        peaks = {PEAK: self.peak_bytes, PLANNED: self.plan.peak_allocated_bytes if self.plan else None}
        for record in (logs, state.log_history[-1] if state.log_history else None):
            if record is not None:
                record.update({name: round(peak / GIB, 3) for name, peak in peaks.items() if peak is not None})

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Undo the patch. A model that was wrapped after the patch keeps it, with a warning."""
        if self.report is None:
            return
        try:
            self.report.undo()
        except PatchError as reason:
            LOG.warning("tigon: the patch stays: %s", reason)
        else:
            self.report = None

    def _planned(self, args: TrainingArguments, model: PreTrainedModel) -> Estimate:
        settings = settings_of(args, model)
        length = self.sequence_length or getattr(args, "max_length", None)
        if length is None:
            raise NotPlanned("not planned: TigonCallback needs sequence_length, the tokens per sample")
        request = Request(
            model=type(model).__name__,
            config=model.config,
            batch=args.per_device_train_batch_size,
            seq=int(length),
            settings=settings,
            masked=self.masked,
            clipped=bool(args.max_grad_norm),
            evaluated=str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no",
        )
        return estimate(request, gpu=self._gpu(args, settings))

    def _gpu(self, args: TrainingArguments, settings: Settings) -> Gpu:
        if self.gpu is not None:
            return find_gpu(self.gpu)
        if args.device.type != "cuda":
            raise NotPlanned("not planned: plans are for GPUs; TigonCallback(gpu='24GiB') plans for another machine")
        return gpu_here(args.device, settings)


def settings_of(args: TrainingArguments, model: PreTrainedModel) -> Settings:
    """The planner's settings for a Trainer's arguments and its model, PEFT's adapters included.

    Raises:
        NotPlanned: the planner does not know an option.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if name not in ALIASES["optim"].values:
        raise NotPlanned(f"not planned: the planner does not know optim={name}")
    if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
        raise NotPlanned("not planned: TigonCallback does not read DeepSpeed's and FSDP's settings; use `tigon plan`")
    adapters = _adapters(model)
    weights = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    pure = not adapters and weights == {torch.bfloat16}
    fp8 = fp8_options(model) if pure else None
    options = {f"train.fp8_{name}": value for name, value in (fp8 or {}).items()}
    precision = (
        ("bf16" if fp8 is None else "fp8") if pure else "amp-bf16" if args.bf16 else "amp-fp16" if args.fp16 else "fp32"
    )
    # transformers 5.23 renames gradient_checkpointing; older releases have only that name.
    recomputes = getattr(args, "activation_checkpointing", False) or args.gradient_checkpointing
    return Settings.of(
        {
            "train.precision": precision,
            "train.optimizer": ALIASES["optim"].values[name],
            "train.checkpointing": "full" if recomputes else "none",
            "train.gradient_accumulation": args.gradient_accumulation_steps,
            "sharding.gpus": args.world_size,
            **adapters,
            **options,
        }
    )


def _adapters(model: PreTrainedModel) -> dict[str, Any]:
    """The recipe keys of PEFT's LoRA; empty without adapters."""
    configs = getattr(model, "peft_config", None)
    if not configs or not any("lora_" in name for name, _ in model.named_parameters()):
        return {}
    config = next(iter(configs.values()))
    targets = config.target_modules
    return {
        "lora.rank": config.r,
        "lora.dropout": config.lora_dropout,
        "lora.rslora": config.use_rslora,
        "lora.dora": config.use_dora,
        "lora.bias": config.bias,
        "lora.targets": (targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        "lora.quantize": bool(getattr(model, "is_loaded_in_4bit", False)),
    }
