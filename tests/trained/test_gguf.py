"""GGUF files are read back by transformers as the trained model, and come with a Modelfile for Ollama."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import replace

import pytest
import torch
from trained_models import make_byte_level, make_family

from tigon.trained import gguf_file

gguf = pytest.importorskip("gguf")
LINE = "weights, tokens, chat template and stop tokens agree"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def saved(folder, model_type="llama", split="gpt-2", **changes):
    make_family(model_type, **changes).save_pretrained(folder)
    make_byte_level(split).save_pretrained(folder)
    return folder


def read(file):
    """The tensors of a file by name, as gguf reads them."""
    tensors = gguf.GGUFReader(file).tensors
    return {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in tensors}


def field(file, name):
    return gguf.GGUFReader(file).get_field(name).contents()


@pytest.mark.parametrize("kind", gguf_file.TYPES)
@pytest.mark.parametrize("family", gguf_file.FAMILIES)
def test_a_file_of_each_family_and_type_is_read_back_by_transformers(tigon, tmp_path, family, kind):
    source = saved(tmp_path / "source", family, tie_word_embeddings=kind == "q8_0")
    done = tigon("export", source, tmp_path / "out", "--gguf", kind)
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if f"from out-{kind}.gguf" in line]
    difference = float(line.split("logits differ by ")[1].split("%")[0])
    assert LINE in line and difference < {"q8_0": 5, "q4_k_m": 40, "q4_0": 60}.get(kind, 0.01 if kind != "f16" else 0.1)
    assert ("output.weight" in read(tmp_path / "out" / f"out-{kind}.gguf")) == (kind != "q8_0")


def test_adapters_are_merged_in_fp32_for_the_file_alone(tigon, tmp_path):
    """The weights of the file are rounded once, and those beside it are the same as without a GGUF file."""
    import peft
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    make_family("llama").to(torch.bfloat16).save_pretrained(source)
    make_byte_level().save_pretrained(source)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32)
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    assert tigon("export", tmp_path / "adapter", tmp_path / "plain", "--merge").code == 0
    done = tigon("export", tmp_path / "adapter", tmp_path / "out", "--merge", "--gguf", "f16")
    assert done.code == 0, done.err
    plain, beside = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "out"))
    assert plain.keys() == beside.keys() and all(torch.equal(plain[name], beside[name]) for name in plain)
    assert {one.dtype for one in beside.values()} == {torch.bfloat16}
    merged = model.merge_and_unload().state_dict()["model.layers.1.mlp.up_proj.weight"]
    found = read(tmp_path / "out" / "out-f16.gguf")["blk.1.ffn_up.weight"].float()
    torch.testing.assert_close(found, merged, rtol=2**-11, atol=2**-25)
    line = next(line for line in done.out.splitlines() if "from out-f16.gguf" in line)
    assert float(line.split("logits differ by ")[1].split("%")[0]) < 0.1, line


@pytest.mark.parametrize(("kind", "step"), [("q8_0", 1 / 127), ("q4_0", 1 / 8)])
def test_a_quantised_weight_is_within_a_step_of_its_block(tigon, tmp_path, kind, step):
    from safetensors.torch import load_file

    source = saved(tmp_path / "source")
    assert tigon("export", source, tmp_path / "out", "--gguf", kind).code == 0
    weight = load_file(source / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].float()
    found = read(tmp_path / "out" / f"out-{kind}.gguf")["blk.1.ffn_up.weight"]
    blocks = weight.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    error = (found.unflatten(-1, (-1, 32)) - blocks).abs() / largest
    # Half a step and the rounding of the scale to fp16; 4 bits have a step less on the side of the largest value.
    assert step / 4 < error.max() <= step * (0.57 if kind == "q8_0" else 1.01)


def test_a_wrong_order_of_rows_is_refused_with_its_layer_and_weights(tigon, tmp_path, monkeypatch):
    source = saved(tmp_path / "source")
    monkeypatch.setitem(gguf_file.FAMILIES, "llama", replace(gguf_file.FAMILIES["llama"], permutes_heads=False))
    line = tigon("export", source, tmp_path / "out", "--gguf", "f16").error_line()
    assert "from out-f16.gguf computes otherwise" in line and "layer 0 is the first that differs" in line
    assert "self_attn.q_proj.weight" in line and [path.name for path in tmp_path.iterdir()] == ["source"]


def test_llama_3s_rotary_scaling_is_written_as_factors(tigon, tmp_path):
    source = saved(tmp_path / "source", rope_parameters=LLAMA3)
    done = tigon("export", source, tmp_path / "out", "--gguf", "f32")
    assert done.code == 0 and "does not read the rotary scaling, which was set from the config" in done.out
    factors = read(tmp_path / "out" / "out-f32.gguf")["rope_freqs.weight"].double()
    wavelengths = 2 * torch.pi * 10000.0 ** (torch.arange(8, dtype=torch.float64) / 8)
    smooth = ((64 / wavelengths - 1) / (4 - 1)).clamp(0, 1)  # 0: divided by the factor; 1: as it is
    assert torch.allclose(factors, 1 / ((1 - smooth) / 8 + smooth), rtol=1e-5)


@pytest.mark.parametrize("split", ["gpt-2", "qwen2", "llama-bpe", "smollm"])
def test_the_way_of_splitting_text_is_named_and_compared(tigon, tmp_path, split):
    source = saved(tmp_path / "source", split=split)
    done = tigon("export", source, tmp_path / "out", "--gguf", "f16")
    assert done.code == 0 and field(tmp_path / "out" / "out-f16.gguf", "tokenizer.ggml.pre") == split
    assert ("so tokens were not compared" in done.out) == (split == "smollm")


def test_tokens_special_tokens_and_template_are_in_the_file(tigon, tmp_path):
    source = saved(tmp_path / "source")
    settings = json.loads((source / "generation_config.json").read_text())
    (source / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [2, 0]}))
    assert tigon("export", source, tmp_path / "out", "--gguf", "f16").code == 0
    file, tokenizer = tmp_path / "out" / "out-f16.gguf", make_byte_level()
    kinds = field(file, "tokenizer.ggml.token_type")
    assert len(kinds) == 320 and kinds[:3] == [3, 3, 3] and kinds[tokenizer.convert_tokens_to_ids("<think>")] == 4
    assert kinds[len(tokenizer) :] == [5] * (320 - len(tokenizer))
    assert field(file, "tokenizer.ggml.eos_token_id") == 2 and field(file, "tokenizer.ggml.eot_token_id") == 0
    assert field(file, "tokenizer.chat_template") == tokenizer.chat_template


def test_a_third_stop_token_is_in_the_modelfile_alone_and_said(tigon, tmp_path):
    source = saved(tmp_path / "source")
    settings = json.loads((source / "generation_config.json").read_text())
    (source / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [2, 0, 1]}))
    done = tigon("export", source, tmp_path / "out", "--gguf", "f16")
    assert done.code == 0 and "names two stop tokens; the Modelfile has '<|im_start|>' too" in done.out
    assert 'PARAMETER stop "<|im_start|>"' in (tmp_path / "out" / "Modelfile").read_text()


def test_rows_that_are_no_multiple_of_a_block_stay_in_16_bits_and_are_counted(tigon, tmp_path):
    source = saved(tmp_path / "source", intermediate_size=100)
    done = tigon("export", source, tmp_path / "out", "--gguf", "q8_0")
    assert done.code == 0 and "2 matrices are F16, because their rows are no multiple of 32" in done.out


def test_a_weight_beyond_fp16_is_refused_by_its_name(tigon, tmp_path):
    model = make_family("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = 1e5
    model.save_pretrained(tmp_path / "source")
    make_byte_level().save_pretrained(tmp_path / "source")
    line = tigon("export", tmp_path / "source", tmp_path / "out", "--gguf", "f16").error_line()
    assert "blk.1.ffn_up.weight holds 99840, and float16 ends at 65504; use --gguf bf16" in line
    assert not (tmp_path / "out").exists()
    assert tigon("export", tmp_path / "source", tmp_path / "out", "--gguf", "bf16").code == 0


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("phi3", {}, "the family phi3 (tigon writes llama, qwen2, qwen3)"),
        ("llama", {"attention_bias": True}, "biases of a llama"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "scaling linear"),
    ],
    ids=["family", "bias", "scaling"],
)
def test_what_tigon_cannot_write_is_named_with_what_can(tigon, tmp_path, monkeypatch, family, changes, named):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    source = saved(tmp_path / "source", family, **changes)
    line = tigon("export", source, tmp_path / "out", "--gguf", "q8_0").error_line()
    assert named in line and "git clone https://github.com/ggml-org/llama.cpp" in line


def test_a_type_that_no_program_writes_is_refused_before_the_converter_is_asked_for(tigon, tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    source = saved(tmp_path / "source", "phi3")
    line = tigon("export", source, tmp_path / "out", "--gguf", "q4_0").error_line()
    assert "--gguf q4_0" in line and "writes f32, f16, bf16, q8_0, auto" in line and "git clone" not in line


def test_a_reward_model_is_refused(tigon, reward_adapter, tmp_path):
    line = tigon("export", reward_adapter, tmp_path / "out", "--merge", "--gguf", "q8_0").error_line()
    assert "--gguf q8_0: tigon writes no GGUF file of a reward model" in line


def test_a_missing_package_is_refused_with_the_command_that_installs_it(tigon, tmp_path, monkeypatch):
    source = saved(tmp_path / "source")
    monkeypatch.setitem(sys.modules, "gguf", None)
    line = tigon("export", source, tmp_path / "out", "--gguf", "q8_0").error_line()
    assert "--gguf needs the package gguf, which is not installed: pip install" in line and "[gguf]" in line


def test_a_full_disk_is_one_line_and_leaves_nothing(tigon, tmp_path, monkeypatch):
    source = saved(tmp_path / "source")

    def fail(self, tensor, *rest):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fail)
    assert "disk is full" in tigon("export", source, tmp_path / "out", "--gguf", "f16").error_line()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_without_verification_it_is_said_and_the_commands_come_last(tigon, tmp_path):
    source = saved(tmp_path / "source")
    done = tigon("export", source, tmp_path / "My Model", "--gguf", "q4_0", "--no-verify")
    assert done.code == 0 and "not verified: My Model-q4_0.gguf was not read back" in done.out
    ollama, llama_cpp = done.out.splitlines()[-2:]
    folder = tmp_path / "My Model"
    assert ollama.endswith(f"ollama create my-model -f '{folder}/Modelfile' && ollama run my-model")
    assert llama_cpp.endswith(f"llama-cli -m '{folder}/My Model-q4_0.gguf' --jinja")
