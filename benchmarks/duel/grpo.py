"""The update of a GRPO step by Unsloth's trainer, and by TRL's with tigon, on the same completions.

    python -m benchmarks.duel.grpo --checkpoint                        # makes the checkpoint that Unsloth reads
    python -m benchmarks.duel.grpo --library unsloth --json RECORD     # on a GPU with 80 GB: about 80 seconds
    python -m benchmarks.duel.grpo --library tigon --json RECORD
    python -m benchmarks.duel.grpo --library tigon --tiny              # a small model, also without a GPU

The model has the shape of Qwen3-4B, random bf16 weights and LoRA of rank 16. `generate` is replaced by random
tokens, which are the same for every library: 8 completions of 256 tokens for each of 8 prompts of 1,024 tokens. So a
step is the update alone.
The first step compiles and is not timed. Two more steps follow in which the library writes its completions itself. Each
library runs in its own process, because Unsloth changes transformers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.duel.inputs import RANK, SEED, TARGETS, byte_tokenizer
from tigon.bench import record

LIBRARIES = ("unsloth", "tigon", "trl")
PACKAGES = ("accelerate", "peft", "torchao", "trl", "unsloth", "unsloth_zoo")
GPU = torch.cuda.is_available()
WAIT_S = 60


def folder_of(tiny: bool) -> Path:
    shared = Path("/dev/shm")
    root = shared if GPU and not tiny and shared.is_dir() else Path(tempfile.gettempdir())
    return root / ("duel-grpo-tiny" if tiny else "duel-grpo-qwen3-4b")


class Given:
    """The fields of a bench that the cases' functions read."""

    def __init__(self, tiny: bool) -> None:
        self.tiny, self.gpu, self.device = tiny, GPU, torch.device("cuda" if GPU else "cpu")


def make_checkpoint(tiny: bool) -> None:
    """Save the model and its tokenizer, unless they were saved before."""
    folder = folder_of(tiny)
    if (folder / "complete").exists():
        return
    model = importlib.import_module("benchmarks.cases.generation").qwen3_4b(Given(tiny))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)  # Unsloth asks for one; the trainers get one of whole words
    (folder / "complete").write_text("", encoding="utf-8")


def unsloth_model(tiny: bool, seq: int) -> Any:
    """The model as Unsloth's notebooks load it for GRPO, without vLLM."""
    fast = importlib.import_module("unsloth").FastLanguageModel
    folder, end_s = folder_of(tiny), time.monotonic() + WAIT_S
    while not (folder / "complete").exists() and time.monotonic() < end_s:
        time.sleep(0.5)
    if not (folder / "complete").exists():
        raise SystemExit("no checkpoint: run `python -m benchmarks.duel.grpo --checkpoint` first")
    model, _ = fast.from_pretrained(
        str(folder), max_seq_length=seq, load_in_4bit=False, load_in_16bit=True, dtype=torch.bfloat16,
        fast_inference=False, use_exact_model_name=True,
    )  # fmt: skip
    return fast.get_peft_model(
        model, r=RANK, lora_alpha=RANK, lora_dropout=0, bias="none", target_modules=[*TARGETS],
        use_gradient_checkpointing="unsloth", random_state=SEED, max_seq_length=seq,
    )  # fmt: skip


class Run:
    """A model of one library, trained by TRL's trainer as that library changes it."""

    def __init__(self, library: str, tiny: bool) -> None:
        start_s = time.monotonic()
        if library == "unsloth":
            importlib.import_module("unsloth")  # before transformers, PEFT and TRL
        self.library, self.tiny = library, tiny
        self.step, self.inputs = (
            importlib.import_module(f"benchmarks.cases.{name}") for name in ("grpo_step", "trl_step")
        )
        self.sizes = self.step.TINY_SIZES if tiny else self.step.SIZES
        _, _, prompt_tokens, new_tokens = self.sizes
        if library == "unsloth":
            self.model, self.adapters = unsloth_model(tiny, prompt_tokens + new_tokens + 8), {}
        else:
            self.model, self.adapters = self.step.qwen3_4b(Given(tiny)), {"peft_config": self.inputs.adapters("lora")}
        self.load_s = round(time.monotonic() - start_s, 1)

    def trainer(self, steps: int) -> Any:
        datasets, trl = (importlib.import_module(name) for name in ("datasets", "trl"))
        prompts, completions, prompt_tokens, new_tokens = self.sizes
        rows = [{"prompt": self.inputs.text(prompt_tokens, seed)} for seed in range(prompts * steps)]
        own: dict[str, Any] = {}
        if self.library != "unsloth":  # it has its own checkpointing
            own = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        made = trl.GRPOTrainer(
            self.model, reward_funcs=self.step.reward, **self.adapters,
            args=trl.GRPOConfig(
                output_dir=tempfile.mkdtemp(), per_device_train_batch_size=prompts * completions,
                num_generations=completions, max_completion_length=new_tokens, max_steps=steps, beta=0.0,
                gradient_accumulation_steps=1, learning_rate=1e-6, bf16=GPU, use_cpu=not GPU, report_to=[],
                save_strategy="no", disable_tqdm=True, logging_steps=1, **own,
            ),
            train_dataset=datasets.Dataset.from_list(rows), processing_class=self.inputs.tokenizer(),
        )  # fmt: skip
        self.model, self.adapters = made.model, {}
        return made

    def updates(self, steps: int) -> dict[str, Any]:
        """Steps with random completions."""
        trainer = self.trainer(steps + 1)
        line: dict[str, Any] = {
            "library": self.library,
            "trainer": f"{type(trainer).__module__}.{type(trainer).__name__}",
            "load_s": self.load_s,
            "sizes": self.sizes,
        }
        if self.library == "tigon":
            line["patched"] = dict(importlib.import_module("tigon").patch(trainer.model).counts)
            fused = importlib.import_module("tigon.integrations.trl").fuse(trainer, shared_prefix=True)
        vocab, draw = 1024 if self.tiny else trainer.model.config.vocab_size, torch.Generator().manual_seed(SEED)
        new_tokens = self.sizes[3]

        def random_tokens(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            drawn = torch.randint(8, min(vocab, 1024), (len(input_ids), new_tokens), generator=draw)
            return torch.cat([input_ids, drawn.to(input_ids)], 1)

        own = vars(trainer.model).get("generate")  # Unsloth's
        vars(trainer.model)["generate"] = random_tokens
        clock = self.step.Clock(trainer, Given(self.tiny).device)
        trainer.train()
        vars(trainer.model).pop("generate", None)
        if own is not None:
            vars(trainer.model)["generate"] = own
        timed = clock.steps[1:]
        if self.library == "tigon":
            line["fused"] = str(fused)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        kept = ("loss", "grad_norm", "reward", "completions/mean_length")
        return {
            **line,
            "update_s": statistics.median(one["update_s"] for one in timed),
            "peak_gib": max(one["update_peak_gib"] for one in timed),
            "steps": timed,
            "warm_up": clock.steps[0],
            "logged": [{name: entry.get(name) for name in kept} for entry in logs],
        }

    def whole_steps(self) -> dict[str, Any]:
        """The second of two steps in which the library writes the completions itself."""
        trainer = self.trainer(2)
        if self.library == "tigon":
            integration = importlib.import_module("tigon.integrations.trl")
            integration.fuse(trainer, shared_prefix=True)
            integration.decode_in_graphs(trainer)
        clock = self.step.Clock(trainer, Given(self.tiny).device)
        trainer.train()
        return {"warm_up": clock.steps[0], "step": clock.steps[1]}


def keep(line: dict[str, Any], path: Path | None) -> None:
    """Print the line, and put it into the record in place of an earlier one of its library."""
    print(json.dumps(line), flush=True)
    if path is None:
        return
    before = json.loads(path.read_text(encoding="utf-8"))["measurements"] if path.exists() else []
    others = [one for one in before if one["library"] != line["library"]]
    record.save({"measurements": [*others, line]}, path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.duel.grpo")
    parser.add_argument("--library", choices=LIBRARIES)
    parser.add_argument("--checkpoint", action="store_true", help="make the checkpoint that Unsloth reads")
    parser.add_argument("--json", type=Path, metavar="RECORD", help="add the line to this record")
    parser.add_argument("--steps", type=int, default=2, help="timed steps (default: 2)")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if given.checkpoint:
        make_checkpoint(given.tiny)
        return
    if given.library is None:
        parser.error("--library requires a name, or use --checkpoint")
    run = Run(given.library, given.tiny)
    line = run.updates(given.steps)
    line["environment"] = record.environment(torch.device("cuda" if GPU else "cpu"), PACKAGES)
    keep(line, given.json)
    line["whole_steps"] = run.whole_steps()
    keep(line, given.json)


if __name__ == "__main__":
    main()
