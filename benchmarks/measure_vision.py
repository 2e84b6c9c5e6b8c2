"""Measure training of a vision-language model with images: the plan's error, and tigon's kernels against none.

    python -m benchmarks.measure_vision --json benchmarks/results/nvidia-h200/training/vision.json
    python -m benchmarks.measure_vision --tiny          a small model; also without a GPU

The model has the shape of SmolVLM-256M and random weights. Every row has one image of 1,024 x 1,024 pixels, which its
processor divides into 17 tiles with 64 tokens each. Three runs of `tigon train` are compared with their plans: full
fine-tuning, the same with recomputed activations, and LoRA of rank 16 on the language model. Then steps with one batch,
which is made before, are timed with and without tigon's kernels. In a run, the processor's work on a CPU takes longer.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import tigon
from benchmarks.step_record import StepRecord, options
from tigon.data import image_rows, images, reading
from tigon.data.chat_template import Rendering
from tigon.data.documents import BadRows
from tigon.trainer import run

_EXAMPLE = Path(__file__).parents[1] / "examples" / "vision" / "make_model.py"
_spec = importlib.util.spec_from_file_location("make_model", _EXAMPLE)
assert _spec is not None and _spec.loader is not None
made: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)

SMOLVLM_256M: Mapping[str, Any] = {
    "text_config": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49280, "max_position_embeddings": 8192,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False,
    },
    "vision_config": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 512, "patch_size": 16,
    },
    "scale_factor": 4, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
PIXELS, TILE, TOKENS_PER_TILE = 1024, 512, 64
LONGEST_ROW = 1178
"""Tokens of the longest row that `save_rows` makes for these images."""
N_ROWS, BATCH = 20, 4
CASES: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "full, recomputed": {"train.checkpointing": "full"},
    "lora": {"lora.rank": 16},
}


def save_model(folder: Path) -> None:
    """Write the model of SmolVLM's shape, and the processor with its sizes."""
    from transformers import AutoModelForImageTextToText, GenerationConfig, Idefics3Config, set_seed

    processor = made.processor(tile=TILE, tokens=TOKENS_PER_TILE, divides=True)
    set_seed(0)
    config = Idefics3Config(**SMOLVLM_256M, image_token_id=processor.image_token_id)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def without_torchvision() -> None:
    """Let runs use the processor made here if transformers cannot load it by name: before 5.23 it needs torchvision."""
    original = images.load_processor

    def load(name: str, **how: Any) -> Any:
        try:
            return original(name, **how)
        except Exception as error:
            tiny = json.loads((Path(name) / "config.json").read_text())["vision_config"]["image_size"] == made.SIZE
            print(f"the processor is made here: {str(error)[:160]}")
            processor = made.processor() if tiny else made.processor(tile=TILE, tokens=TOKENS_PER_TILE, divides=True)
            processor.tokenizer.chat_template = processor.chat_template
            return processor

    images.load_processor = load


def measured(folder: Path, name: str, keys: Mapping[str, Any], *, tiny: bool) -> dict[str, Any]:
    """One run of `tigon train`: its comparison with the plan, and that of the kernels."""
    recipe = folder / "vision.yaml"
    recipe.write_text("data: {images: 1}\ntrain: {steps: 3, warmup_steps: 0}\n", encoding="utf-8")
    common = {
        "model.name": folder / "model", "data.source": folder / "rows.jsonl", "output.folder": folder / "runs",
        "output.name": name.replace(", ", "-"), "output.sample_tokens": 0, "output.save_model": "false",
        "data.sequence_length": 96 if tiny else LONGEST_ROW, "train.batch_size": BATCH, "data.eval_fraction": 0.05,
        "train.workers": 0 if tiny else 8, "train.log_steps": 1, "data.image_size": made.SIZE if tiny else PIXELS,
        "train.report_to": "none",
    }  # fmt: skip
    path = run.train(recipe, [f"{key}={value}" for key, value in {**common, **keys}.items()])
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    speeds = [record["tokens_per_s"] for record in records if "tokens_per_s" in record]
    data = json.loads((path / "data.json").read_text(encoding="utf-8"))
    return {
        "name": name, "keys": dict(keys), "memory": summary["memory"],
        "tokens_per_s": speeds, "eval_loss": summary["eval_loss"], "rows": data["rows"], "tokens": data["tokens"],
    }  # fmt: skip


def steps(folder: Path, kernels: str, device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Times of training steps with one batch, by the model's own forward under autocast."""
    from transformers import AutoModelForImageTextToText

    processor = made.processor() if tiny else made.processor(tile=TILE, tokens=TOKENS_PER_TILE, divides=True)
    processor.tokenizer.chat_template = processor.chat_template
    size = made.SIZE if tiny else PIXELS
    documents = reading.read([str(folder / "rows.jsonl")], image_rows.PicturedRows(1), None)[:BATCH]
    encoded = images.Encoder(processor, Rendering(), 1 << 20, size, BadRows()).encode(documents)
    collate = images.PicturedCollator(0, packing=False, processor=processor, size=size)
    batch = collate(images.samples(encoded, 1 << 20, too_long="error").samples)
    batch = {name: value.to(device) for name, value in batch.items()}
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32).to(device).train()
    if kernels == "tigon":
        print(tigon.patch(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    times, losses = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3 if tiny else 12):
        start_s = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))  # waits for the device
        times.append(time.perf_counter() - start_s)
    peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "kernels": kernels, "step_s": statistics.median(times[2:]), "all_step_s": times, "losses": losses,
        "peak_bytes": peak_bytes, "tokens": int(batch["input_ids"].numel()),
    }  # fmt: skip


def main() -> None:
    asked = options(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record, rows = StepRecord("measure_vision", device), list[dict[str, Any]]()
    without_torchvision()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (made.save_model if asked.tiny else save_model)(folder / "model")
        made.save_rows(folder / "rows.jsonl", N_ROWS, size=made.SIZE if asked.tiny else PIXELS)
        timed: list[dict[str, Any]] = []
        for kernels in ("none", "tigon"):
            timed.append(steps(folder, kernels, device, tiny=asked.tiny))
            gc.collect()
            print(json.dumps(timed[-1]))
            record.write(asked.json, steps=timed, runs=rows)
        for name, keys in CASES.items():
            rows.append(measured(folder, name, keys, tiny=asked.tiny))
            print(json.dumps(rows[-1]))
            record.write(asked.json, steps=timed, runs=rows)


if __name__ == "__main__":
    main()
