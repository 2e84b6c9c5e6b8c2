"""Runs with adapters, from a bf16 checkpoint with a chat template to plain transformers and PEFT."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny_checkpoint import EXPERTS, chats, put_experts_into_mxfp4, save
from trainer_helpers import cut_back, losses

from tigon.errors import RecipeError
from tigon.recipe.keys import Recipe
from tigon.trainer.guards import preflight
from vllm_loader import served

peft = pytest.importorskip("peft")
IDS = torch.tensor([[4 + (7 * i) % 250 for i in range(24)]])


@dataclass(frozen=True)
class Done:
    """A finished command, and the logits of the model that it trained."""

    outcome: Any
    logits: torch.Tensor

    @property
    def code(self) -> int:
        return int(self.outcome.code)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoints(kind): a checkpoint, made once."""
    kinds: dict[str, dict[str, Any]] = {
        "bf16": {}, "fp32": {"dtype": torch.float32}, "tied": {"tie_word_embeddings": True},
        "experts": {"model_type": "qwen3_moe", **EXPERTS}, "biases": {"attention_bias": True},
        "wide": {"hidden_size": 64},
        # bitsandbytes dequantises rows on a CPU rightly only if their length is a multiple of 64
        "wide experts": {"model_type": "qwen3_moe", **EXPERTS, "hidden_size": 64, "moe_intermediate_size": 64},
        "mxfp4": {
            "model_type": "gpt_oss", "hidden_size": 64, "head_dim": 32, "num_local_experts": 4,
            "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }  # fmt: skip
    kinds["mxfp4 odd"] = kinds["mxfp4"]
    store = tmp_path_factory.mktemp("checkpoints")

    def made(kind: str) -> Path:
        if not (store / kind).exists():
            save(store / kind, **kinds[kind])
            if kind.startswith("mxfp4"):
                put_experts_into_mxfp4(store / kind)
        return store / kind

    return made


@pytest.fixture
def run(here: Path, tigon: Any, checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """run(kind, sets...): `tigon train` on chats; returns what the command printed and the trained model's logits."""
    from tigon.trainer.checkpoint.final_model import FinalModel

    chats(here / "chats.jsonl")
    mapping = {
        "data": {"source": "chats.jsonl", "sequence_length": 64, "eval_fraction": 0.1},
        "train": {"steps": 4, "batch_size": 4, "learning_rate": 0.02, "log_steps": 1, "device": "cpu",
                  "precision": "amp-bf16"},
        "output": {"name": "r", "sample_tokens": 0},
    }  # fmt: skip
    seen: dict[str, torch.Tensor] = {}
    saved = FinalModel.save

    def look(self: Any, built: Any, trainer: Any) -> None:
        built.eval()
        with torch.no_grad():
            seen["logits"] = logits_of(built)
        saved(self, built, trainer)

    monkeypatch.setattr(FinalModel, "save", look)

    def train(kind: str, *sets: str, kernels: str = "none", resume: bool = False) -> Done:
        path, model = here / "recipe.yaml", {"name": str(checkpoints(kind)), "kernels": kernels}
        path.write_text(yaml.safe_dump({"model": model, **mapping}), encoding="utf-8")
        words = [word for text in sets for word in ("--set", text)]
        outcome = tigon("train", path, *words, *(["--resume"] if resume else []))
        return Done(outcome, seen.pop("logits", torch.empty(0)))

    return train


def logits_of(model: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.float()


def rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())


def adapted(checkpoint: Path, adapters: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The checkpoint with the saved adapters, by transformers and PEFT alone."""
    from transformers import AutoModelForCausalLM

    return peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype), adapters
    ).eval()


def whole(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options).eval()


def dtypes_in(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for file in folder.glob("*.safetensors") for tensor in load_file(file).values()}


def test_adapters_load_in_peft_with_the_trained_models_logits(run, here, checkpoints):
    outcome = run("bf16", "lora.rank=4")
    assert outcome.code == 0
    folder = here / "runs" / "r" / "adapters"
    assert not (here / "runs" / "r" / "model").exists(), "merging is on request"
    assert dtypes_in(folder) == {torch.float32}, "the adapters keep the dtype of training"
    assert torch.equal(logits_of(adapted(checkpoints("bf16"), folder)), outcome.logits)
    with torch.no_grad():
        before = logits_of(whole(checkpoints("bf16")))
    assert (outcome.logits - before).abs().max() > 0.1, "the adapters learned something"
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    assert torch.equal(logits_of(auto), outcome.logits), "base_model_name_or_path names the checkpoint"


def test_adapters_of_runs_and_of_a_checkpoint_are_loaded_beside_each_other(run, here, checkpoints):
    wanted = {}
    for seed in (1, 2):
        sets = ("lora.rank=4", "train.save_steps=4", f"train.seed={seed}", f"output.name=seed{seed}")
        wanted[f"seed{seed}"] = run("bf16", *sets).logits
    runs = here / "runs"
    model = peft.PeftModel.from_pretrained(
        whole(checkpoints("bf16")), runs / "seed1" / "adapters", adapter_name="seed1"
    )
    model.load_adapter(runs / "seed2" / "adapters", adapter_name="seed2")
    model.load_adapter(runs / "seed2" / "checkpoints" / "checkpoint-4", adapter_name="step4")
    assert not torch.equal(wanted["seed1"], wanted["seed2"])
    for name, logits in {**wanted, "step4": wanted["seed2"]}.items():
        model.set_adapter(name)
        assert torch.equal(logits_of(model.eval()), logits), name


def test_adapter_files_are_those_that_an_inference_server_reads(run, here, checkpoints):
    assert run("bf16", "lora.rank=4", "lora.targets=[q_proj, down_proj]").code == 0
    folder = here / "runs" / "r" / "adapters"
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], config["peft_type"], config["task_type"]) == (4, 8, "LORA", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(checkpoints("bf16"))
    paths = {f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")}
    assert served(folder).keys() == paths
    beside = {"README.md", "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert beside <= {file.name for file in folder.iterdir()}
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "vllm serve path/to/the/base/model --enable-lora --max-lora-rank 8 --lora-modules r=" in card


@pytest.mark.parametrize("more", ["lora.dropout=0.1", "lora.base_offload=true"])
def test_resumed_adapters_are_those_of_an_uninterrupted_run(more, run, here):
    sets = ("lora.rank=4", more, "train.save_steps=2", "output.name=whole")
    assert run("bf16", *sets).code == 0
    runs = here / "runs"
    shutil.rmtree(cut_back(runs / "whole", "cut", 4) / "adapters")
    recipe = runs / "cut" / "recipe.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("name: whole", "name: cut"), encoding="utf-8")
    assert run("bf16", *sets[:-1], "output.name=cut", resume=True).code == 0
    want, got = (load_file(runs / name / "adapters" / "adapter_model.safetensors") for name in ("whole", "cut"))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    assert losses(runs / "cut")[-2:] == losses(runs / "whole")[-2:]


@pytest.mark.parametrize(
    ("kind", "kernels", "more"),
    [
        ("wide", "tigon", ()),
        ("wide", "none", ()),
        ("wide", "tigon", ("lora.quantize=true",)),
        ("wide", "none", ("lora.quantize=true",)),
        ("wide experts", "tigon", ("lora.quantize=true", "lora.targets=[linear, experts]")),
        ("experts", "tigon", ("lora.targets=[linear, experts]",)),
    ],
)
def test_layers_on_the_host_train_the_same_adapters_to_the_bit(kind, kernels, more, run, here):
    if "lora.quantize=true" in more:
        pytest.importorskip("bitsandbytes")
    sets = ("lora.rank=4", "train.checkpointing=full", "train.gradient_accumulation=2", "train.eval_steps=2", *more)
    sets += ("output.merge=true", "output.sample_tokens=4")
    whole_runs = {}
    for name, offload in (("device", "false"), ("host", "true")):
        outcome = run(kind, *sets, f"lora.base_offload={offload}", f"output.name={name}", kernels=kernels)
        assert outcome.code == 0, outcome.outcome.err
        whole_runs[name] = outcome.logits
    runs = here / "runs"
    assert torch.equal(whole_runs["host"], whole_runs["device"])
    assert losses(runs / "host") == losses(runs / "device")
    for file in ("adapters/adapter_model.safetensors", "model/model.safetensors"):
        want, got = (load_file(runs / name / file) for name in ("device", "host"))
        assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want), file


@pytest.mark.parametrize(
    ("offload", "gpu_gib", "host_gib", "refused"),
    [(False, 24, 64, "cuda has 24 GiB; .*or set lora.base_offload: true"), (True, 24, 64, None),
     (True, 24, 16, "cpu has 16 GiB; choose a smaller model$")],
)  # fmt: skip
def test_layers_on_the_host_need_the_hosts_memory(offload, gpu_gib, host_gib, refused, monkeypatch):
    has = {"cuda": gpu_gib, "cpu": host_gib}
    monkeypatch.setattr(preflight, "total_bytes", lambda device: has[device.type] * 2**30)
    recipe = Recipe().having({"lora.rank": 16, "lora.quantize": True, "lora.base_offload": offload})
    shapes = {"weight": (70, 10**9)}
    with pytest.raises(RecipeError, match=refused) if refused else nullcontext():
        preflight.check_memory(recipe, recipe.settings(), torch.device("cuda"), shapes)


def test_a_checkpoint_that_lacks_an_adapter_is_not_resumed_with_a_new_one(run, here):
    """Its manifest agrees with its files, so only a comparison with the model shows it."""
    from tigon.trainer.checkpoint.checkpoint import digest

    assert run("bf16", "lora.rank=4", "train.save_steps=2").code == 0
    shutil.rmtree(here / "runs" / "r" / "adapters")
    (here / "runs" / "r" / "summary.json").unlink()
    for folder in (here / "runs" / "r" / "checkpoints").iterdir():
        file, manifest = folder / "adapter_model.safetensors", folder / "manifest.json"
        state = load_file(file)
        lost = sorted(state)[0]
        del state[lost]
        save_file(state, file, {"format": "pt"})
        declared = json.loads(manifest.read_text())
        declared["files"][file.name] = {"bytes": file.stat().st_size, "sha256": digest(file)}
        manifest.write_text(json.dumps(declared))
    outcome = run("bf16", "lora.rank=4", "train.save_steps=2", resume=True).outcome
    assert outcome.code == 2 and f"is not complete: it lacks 1 tensor: {lost}" in outcome.err


# What is trained -> (checkpoint, recipe keys).
KINDS = {
    "pattern": ("bf16", (r"lora.targets=['.*\.layers\.1\..*_proj']", "lora.rslora=true", "lora.alpha=3")),
    "dora": ("bf16", ("lora.dora=true", "lora.init=gaussian")),
    "modules_to_save": ("bf16", ("lora.targets=all-linear", "lora.modules_to_save=[lm_head, norm]")),
    "tied head saved": ("tied", ("lora.modules_to_save=[lm_head]",)),
    "tied embeddings": ("tied", ("lora.targets=[linear, embeddings]",)),
    "biases": ("biases", ("lora.bias=all", "lora.init=orthogonal")),
    "olora": ("bf16", ("lora.init=olora",)),
    "pissa": ("bf16", ("lora.init=pissa_niter_4", "lora.rslora=true")),
    "experts": ("experts", ("lora.targets=[linear, experts]",)),
    "fp32 base": ("fp32", ("lora.base=fp32", "lora.init=pissa")),
}  # fmt: skip
# Those that vLLM does not load, and why. vllm_loader.py repeats its steps.
UNSERVED = {
    "dora": "no DoRA", "modules_to_save": "no whole modules", "tied head saved": "no whole modules",
    "biases": "no trained biases",
}  # fmt: skip
# olora and pissa split a weight in two; the products with its parts, and what remains of it, are rounded to bf16. PEFT
# loads whole modules in the dtype of the base model.
ROUNDED = {"olora", "pissa", "fp32 base", "modules_to_save"}


@pytest.mark.parametrize("name", KINDS)
def test_adapters_of_each_kind_load_in_peft_and_merge_on_request(name, run, here, checkpoints):
    kind, sets = KINDS[name]
    outcome = run(kind, "lora.rank=4", *sets, "output.merge=true")
    assert outcome.code == 0
    dtype = torch.float32 if name == "fp32 base" else torch.bfloat16
    got = logits_of(adapted(checkpoints(kind), here / "runs" / "r" / "adapters", dtype))
    scale = float(outcome.logits.std())
    assert rms(got - outcome.logits) < (0.03 if name in ROUNDED else 1e-3) * scale
    assert rms(got - logits_of(whole(checkpoints(kind)))) > 0.1 * scale, "nothing was learned"
    merged = whole(here / "runs" / "r" / "model")
    assert merged.dtype == dtype
    assert rms(logits_of(merged) - got) < 0.03 * scale
    assert not (here / "runs" / "r" / "initial-adapters").exists()
    check_served(here / "runs" / "r" / "adapters", outcome.outcome.out, UNSERVED.get(name))


def check_served(adapters: Path, printed: str, reason: str | None) -> None:
    """The console and the card say whether vLLM loads the adapters, and vLLM's steps agree."""
    card = (adapters / "README.md").read_text(encoding="utf-8")
    if reason is None:
        assert "vLLM does not load" not in printed + card and "--enable-lora" in card
        assert served(adapters, n_experts=4)
        return
    assert re.search(f"serving  vLLM does not load these adapters: it (has|takes) {reason}", printed)
    assert reason in card and "--enable-lora" not in card
    with pytest.raises(ValueError, match="not legal"):
        served(adapters)


def test_adapters_of_experts_in_tigons_op_load_in_peft(run, here, checkpoints):
    outcome = run("experts", "lora.rank=4", "lora.targets=[linear, experts]", kernels="tigon")
    assert outcome.code == 0
    got = logits_of(adapted(checkpoints("experts"), here / "runs" / "r" / "adapters"))
    scale = float(outcome.logits.std())
    assert rms(got - outcome.logits) < 0.03 * scale  # PEFT rounds the sum of weight and adapter to bf16
    assert rms(got - logits_of(whole(checkpoints("experts")))) > 0.1 * scale, "nothing was learned"


def test_adapters_of_4_bit_experts_load_in_peft(run, here, checkpoints):
    pytest.importorskip("bitsandbytes")
    sets = ("lora.rank=4", "lora.targets=[linear, experts]", "lora.quantize=true")
    outcome = run("wide experts", *sets, kernels="tigon")
    assert outcome.code == 0
    got = logits_of(adapted(checkpoints("wide experts"), here / "runs" / "r" / "adapters"))
    scale = float(outcome.logits.std())
    # The trained model's weights are rounded to 4 bits, an error of a tenth; these are the checkpoint's.
    learned = rms(got - logits_of(whole(checkpoints("wide experts"))))
    assert rms(got - outcome.logits) < min(learned, 0.4 * scale)
    assert losses(here / "runs" / "r")[-1] < losses(here / "runs" / "r")[0]
    check_served(here / "runs" / "r" / "adapters", outcome.outcome.out, None)


def test_loftq_adapters_start_nearer_to_the_checkpoint_and_are_saved_for_its_weights(run, here, checkpoints, tigon):
    pytest.importorskip("bitsandbytes")
    sets = ("lora.rank=8", "lora.quantize=true", "train.save_steps=4")
    unquantised = logits_of(whole(checkpoints("wide")))

    def distance(init: str) -> float:
        """That of the model before training to the unquantised checkpoint."""
        done = run(
            "wide", *sets, f"lora.init={init}", "train.steps=1", "train.learning_rate=1e-12", f"output.name={init}"
        )
        assert done.code == 0
        return rms(done.logits - unquantised)

    assert distance("loftq") < 0.9 * distance("default")
    outcome = run("wide", *sets, "lora.init=loftq")
    assert outcome.code == 0
    folder = here / "runs" / "r" / "adapters"
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (16, 32, True)
    got = logits_of(adapted(checkpoints("wide"), folder))
    scale = float(outcome.logits.std())
    learned = rms(got - unquantised)
    assert rms(got - outcome.logits) < min(learned, 0.4 * scale)
    assert not (here / "runs" / "r" / "initial-adapters").exists()
    card = (here / "runs" / "r" / "adapters" / "README.md").read_text(encoding="utf-8")
    assert "The adapters belong to the base model's own weights" in card
    refused = tigon("export", here / "runs" / "r" / "checkpoints" / "checkpoint-4", here / "exported")
    assert "loftq a checkpoint's adapters belong to the run's 4-bit weights" in refused.error_line()


def exported(here: Path, tigon: Any) -> Any:
    """The run's model with merged adapters, as `tigon export` writes it."""
    assert tigon("export", here / "runs" / "r", here / "exported", "--merge").code == 0
    return whole(here / "exported")


MXFP4 = ("lora.rank=4", "lora.quantize=true", "lora.quantize_to=mxfp4", "model.attention=eager")


def test_experts_in_mxfp4_stay_so_and_their_adapters_load_in_peft(run, here, tigon, checkpoints):
    outcome = run("mxfp4", *MXFP4, "lora.targets=[linear, experts]", "output.merge=true", kernels="tigon")
    assert outcome.code == 0
    folder = here / "runs" / "r"
    got = logits_of(adapted(checkpoints("mxfp4"), folder / "adapters"))
    scale = float(outcome.logits.std())
    assert rms(got - outcome.logits) < 0.03 * scale
    assert rms(got - logits_of(whole(checkpoints("mxfp4")))) > 0.05 * scale, "nothing was learned"
    check_served(folder / "adapters", outcome.outcome.out, None)
    assert losses(folder)[-1] < losses(folder)[0]
    assert rms(logits_of(exported(here, tigon)) - outcome.logits) < 0.03 * scale
    merged = whole(folder / "model")
    assert rms(logits_of(merged) - outcome.logits) < 0.03 * scale
    assert not any(parameter.dtype is torch.uint8 for parameter in merged.parameters())


@pytest.mark.parametrize(
    ("kind", "sets", "why"),
    [
        ("mxfp4", ("lora.rank=4",), "experts in MXFP4; set .*lora.quantize_to: mxfp4"),
        ("mxfp4", (), "experts in MXFP4; set .*lora.quantize_to: mxfp4.*gpt-oss-20b-BF16"),
        ("experts", MXFP4, "has none in MXFP4; set lora.quantize_to: nf4"),
    ],
)
def test_experts_in_mxfp4_and_the_key_that_keeps_them_go_together(run, here, kind, sets, why):
    refused = run(kind, *sets, kernels="tigon").outcome
    assert re.search(why, refused.error_line())
    assert not (here / "runs").exists()


def test_experts_in_mxfp4_whose_rows_are_no_whole_blocks_are_refused(run, checkpoints):
    config = checkpoints("mxfp4 odd") / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"intermediate_size": 64', '"intermediate_size": 80'))
    refused = run("mxfp4 odd", *MXFP4, kernels="tigon").outcome
    assert "down_proj has 80 inputs, and MXFP4 stores blocks of 32" in refused.error_line()


def test_experts_in_mxfp4_need_tigons_op(run):
    refused = run("mxfp4", *MXFP4, kernels="none").outcome
    assert re.search("wait for the backward.*model.kernels: tigon", refused.error_line())


def test_4_bit_experts_get_adapters_from_tigons_op_alone(run, here):
    refused = run("experts", "lora.rank=4", "lora.targets=experts", "lora.quantize=true", kernels="none").outcome
    assert re.search("behind after each forward.*model.kernels: tigon", refused.error_line())


def test_merging_adds_nothing_but_rounding_to_the_weights(run, here, checkpoints):
    assert run("bf16", "lora.rank=4", "output.merge=true", kernels="tigon").code == 0
    folder = here / "runs" / "r"
    exact = adapted(checkpoints("bf16"), folder / "adapters", torch.float32).merge_and_unload().state_dict()
    merged = load_file(folder / "model" / "model.safetensors")
    assert merged.keys() == exact.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor.float(), exact[name], rtol=2**-7, atol=2**-12, msg=name)


def test_run_with_adapters_says_that_no_expert_is_trained(run, here):
    line = "the experts get no adapter and stay frozen: "
    done = run("experts", "lora.rank=4", "train.steps=1")
    assert done.code == 0 and done.outcome.out.count(line) == 1
    assert line in (here / "runs" / "r" / "report.md").read_text(encoding="utf-8")
    assert line in (here / "runs" / "r" / "report.html").read_text(encoding="utf-8")
    with_experts = run("experts", "lora.rank=4", "lora.targets=experts", "train.steps=1", "output.name=e")
    assert with_experts.code == 0 and line not in with_experts.outcome.out


REFUSED = {
    "no such module": ("lora.targets=q_porj", "'q_porj' names no module of this model; the nearest is q_proj"),
    "no pattern": ("lora.targets='*_proj'", r"is not a regular expression \(nothing to repeat"),
    "no adapter for a norm": ("lora.targets=norm", "a LlamaRMSNorm, and PEFT adapts linear modules"),
    "no experts": ("lora.targets=experts", "the model has no experts"),
    "biases": ("lora.bias=all", "no module of the model has a bias; set lora.bias: none"),
    "data for the initialisation": ("lora.init=eva", "needs a pass over the data"),
    "odd rank": ("lora.init=orthogonal", "lora.rank is 3, but must be even; set lora.rank: 4"),
    "trained twice": ("lora.modules_to_save=[q_proj]", "which also gets an adapter"),
    "unknown module to save": ("lora.modules_to_save=[lmhead]", "the nearest is lm_head"),
}  # fmt: skip


@pytest.mark.parametrize("sets, message", REFUSED.values(), ids=REFUSED.keys())
def test_adapters_that_cannot_be_made_are_refused_before_the_folder_exists(sets, message, run, here):
    outcome = run("bf16", "lora.rank=3", *re.split(r",(?=\w+\.)", sets)).outcome
    assert re.search(message, outcome.error_line())
    assert not (here / "runs").exists()


# --- whole models ----------------------------------------------------------------------------------------------------


def test_fine_tuned_bf16_checkpoint_comes_back_as_bf16_with_all_its_files(run, here, checkpoints):
    done = run("bf16", "output.max_shard_size=20KB")
    assert done.code == 0
    folder = here / "runs" / "r" / "model"
    assert dtypes_in(folder) == {torch.bfloat16} == dtypes_in(checkpoints("bf16"))
    assert (folder / "model.safetensors.index.json").exists() and len(list(folder.glob("model-*.safetensors"))) > 1
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (folder, checkpoints("bf16")))
    assert ours == theirs, "with the dtype and use_cache of the checkpoint"
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (folder / name).read_text() == (checkpoints("bf16") / name).read_text()
    scale = float(done.logits.std())
    torch.testing.assert_close(logits_of(whole(folder)), done.logits, rtol=0, atol=0.1 * scale)
    from transformers import AutoTokenizer

    chat = [{"role": "user", "content": "say lotis"}]
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False) == "<user>say lotis"


@pytest.mark.parametrize(
    "kind, sets, dtype",
    [("fp32", (), torch.float32), ("bf16", ("output.dtype=fp32",), torch.float32),
     ("fp32", ("output.dtype=bf16",), torch.bfloat16)],
    ids=["as loaded", "wider", "narrower"],
)  # fmt: skip
def test_saved_dtype_is_that_of_the_checkpoint_unless_the_recipe_names_one(kind, sets, dtype, run, here):
    assert run(kind, "train.steps=1", *sets).code == 0
    folder = here / "runs" / "r" / "model"
    assert dtypes_in(folder) == {dtype}
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_each_weight_keeps_the_dtype_that_it_has_in_the_checkpoint(run, here, checkpoints, tmp_path):
    mixed = tmp_path / "mixed"
    shutil.copytree(checkpoints("bf16"), mixed)
    state = load_file(mixed / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"].float()
    save_file(state, mixed / "model.safetensors", metadata={"format": "pt"})
    assert run("bf16", f"model.name={mixed}", "train.steps=1").code == 0
    saved = load_file(here / "runs" / "r" / "model" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in saved.items()} == {name: t.dtype for name, t in state.items()}


@pytest.mark.parametrize("sets", [(), ("lora.rank=4", "output.merge=true")], ids=["whole", "merged"])
def test_a_weight_too_large_for_the_saved_dtype_keeps_the_checkpoints_dtype(sets, run, here, checkpoints, tmp_path):
    shutil.copytree(checkpoints("bf16"), tmp_path / "large")
    file = tmp_path / "large" / "model.safetensors"
    state = load_file(file)
    state["model.embed_tokens.weight"][-1, 0] = 1e5  # of a token that the text does not have
    save_file(state, file, metadata={"format": "pt"})
    done = run("bf16", f"model.name={tmp_path / 'large'}", "train.steps=1", "output.dtype=fp16", *sets)
    assert (
        done.code == 0 and "float16 ends at 65504; all weights are saved as with output.dtype: auto" in done.outcome.out
    )
    saved = load_file(here / "runs" / "r" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert saved["model.embed_tokens.weight"][-1, 0] == state["model.embed_tokens.weight"][-1, 0]


def test_checkpoints_for_resuming_keep_fp32(run, here):
    assert run("bf16", "train.save_steps=2").code == 0
    assert dtypes_in(here / "runs" / "r" / "checkpoints" / "checkpoint-4") == {torch.float32}


def test_model_card_names_base_data_recipe_versions_and_figures(run, here, checkpoints):
    assert run("bf16", "lora.rank=4", "output.merge=true").code == 0
    summary = json.loads((here / "runs" / "r" / "summary.json").read_text())
    for name, library in (("adapters", "peft"), ("model", "transformers")):
        card = (here / "runs" / "r" / name / "README.md").read_text(encoding="utf-8")
        front = yaml.safe_load(card.split("---")[1])
        assert front["library_name"] == library and "lora" in front["tags"]
        assert f"`{checkpoints('bf16')}`" in card and "`chats.jsonl`" in card and "rank: 4" in card
        assert f"| torch | {torch.__version__} |" in card and f"| peft | {peft.__version__} |" in card
        assert f"| {summary['eval_loss']:.4f} |" in card
