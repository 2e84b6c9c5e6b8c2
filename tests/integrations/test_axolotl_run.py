"""The plugin in Axolotl itself: its manager, its validation of a configuration, and a training run.

Axolotl pins its requirements, so it has an environment of its own. Elsewhere these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

base = pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed (an environment of its own)")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from axolotl.integrations.config import merge_input_args  # noqa: E402
from axolotl.utils.dict import DictDefault  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from tigon.integrations.axolotl import TigonPlugin  # noqa: E402

ROOT = Path(__file__).parents[2]
PLUGIN = "tigon.integrations.axolotl.TigonPlugin"
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
WORDS = 60


def small_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS + len(SPECIAL), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Axolotl's manager, which is one object per process, without plugins."""
    found = base.PluginManager.get_instance()
    monkeypatch.setattr(found, "plugins", type(found.plugins)())
    yield found


def test_plugin_is_one_of_axolotls(manager: Any) -> None:
    assert issubclass(TigonPlugin, base.BasePlugin)
    manager.register(PLUGIN)
    assert [type(plugin) for plugin in manager.plugins.values()] == [TigonPlugin]


def test_axolotl_accepts_the_keys_of_the_plugin(manager: Any) -> None:
    manager.register(PLUGIN)
    _, schema = merge_input_args()
    assert "tigon_leave_out" in schema.model_fields


def test_hooks_of_the_manager_patch_the_model_and_undo_it(manager: Any) -> None:
    manager.register(PLUGIN)
    manager.cfg = cfg = DictDefault({"plugins": [PLUGIN], "tigon_leave_out": ["rope"]})
    model, ids = small_model().train(), torch.arange(12).reshape(2, 6)
    before = model(input_ids=ids, labels=ids).loss
    manager.post_model_build(cfg, model)
    (plugin,) = manager.plugins.values()
    assert plugin.report.counts["linear_cross_entropy"] == 1 and "rope" not in plugin.report.counts
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, before, rtol=1e-5, atol=1e-6)
    manager.post_train(cfg, model)
    assert {type(module).__module__.partition(".")[0] for module in model.modules()} == {"torch", "transformers"}


def train(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    """Train the checkpoint in `folder` with Axolotl; what axolotl_run.py prints."""
    config = {
        "base_model": str(folder / "model"), "dataset_prepared_path": str(folder / f"{name}-data"),
        "output_dir": str(folder / name), "sequence_len": 32, "micro_batch_size": 4, "max_steps": 5,
        "datasets": [{"path": str(folder / "rows.jsonl"), "ds_type": "json", "type": "completion", "field": "text"}],
        "gradient_accumulation_steps": 1, "learning_rate": 3e-3, "lr_scheduler": "constant", "logging_steps": 1,
        "optimizer": "adamw_torch", "val_set_size": 0, "use_cpu": True, "bf16": False, "fp16": False, "tf32": False,
        "attn_implementation": "sdpa", "save_strategy": "no", "dataset_num_proc": 1, "seed": 7, **keys,
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    paths = os.pathsep.join([str(ROOT / "src"), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("axolotl_run.py")), str(path)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, cwd=folder, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("axolotl.train", "wandb"):
        pytest.importorskip(module, reason="a requirement of axolotl is not installed", exc_type=ImportError)
    place = tmp_path_factory.mktemp("axolotl")
    words = [*SPECIAL, *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(place / "model")
    small_model().save_pretrained(place / "model")
    rows = ({"text": " ".join(f"w{(i + j) % WORDS}" for j in range(20))} for i in range(64))
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    pairs = (
        {
            "messages": [{"role": "user", "content": f"w{i % WORDS} w{(i + 1) % WORDS}"}],
            "chosen": {"role": "assistant", "content": f"w{(i + 2) % WORDS}"},
            "rejected": {"role": "assistant", "content": "w5"},
        }
        for i in range(64)
    )
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    return place


def test_axolotl_trains_with_the_same_losses_and_ends_unpatched(folder: Path) -> None:
    plain, patched = train(folder, "plain"), train(folder, "patched", plugins=[PLUGIN])
    assert plain["plugins"] == [] and patched["plugins"] == ["TigonPlugin"]
    assert len(patched["losses"]) == 5 and patched["losses"][-1] < patched["losses"][0]
    # Axolotl rounds what it logs to 4 decimals or fewer.
    assert patched["losses"] == pytest.approx(plain["losses"], abs=2e-3)
    assert patched["modules"] == ["torch", "transformers"] and patched["fused"] == []


def test_axolotl_trains_on_preferences_with_the_fused_head(folder: Path) -> None:
    pairs = {
        "path": str(folder / "pairs.jsonl"), "ds_type": "json", "split": "train", "type": "chat_template.default",
        "field_messages": "messages", "field_chosen": "chosen", "field_rejected": "rejected",
    }  # fmt: skip
    keys = {"rl": "dpo", "chat_template": "chatml", "datasets": [pairs]}
    plain, patched = train(folder, "plain-dpo", **keys), train(folder, "dpo", plugins=[PLUGIN], **keys)
    assert plain["fused"] == [] and len(patched["fused"]) == 1
    assert patched["losses"] == pytest.approx(plain["losses"], abs=2e-3)
    assert patched["losses"][-1] < patched["losses"][0]


def test_axolotl_adds_adapters_to_a_patched_model(folder: Path) -> None:
    lora = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, "lora_dropout": 0.0}
    lora |= {f"lora_{part}_kernel": False for part in ("qkv", "o", "mlp")}  # Axolotl's kernels need a GPU
    found = train(folder, "lora", plugins=[PLUGIN], **lora)
    assert found["plugins"] == ["TigonPlugin"] and "tigon" not in found["modules"]
    assert found["losses"][-1] < found["losses"][0]
