"""`tigon export --format` writes weights that transformers reads back through compressed-tensors, bit for bit."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from trained_models import make_byte_level, make_family

from tigon.techniques.qat import formats
from tigon.trained import quantized_export

LINE = "weights, tokens, chat template and stop tokens agree"


def saved(folder, model_type="llama", **changes):
    make_family(model_type, **changes).save_pretrained(folder)
    make_byte_level().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", formats.FORMATS)
def test_transformers_reads_each_format_as_it_was_rounded(tigon, tmp_path, name, tied):
    pytest.importorskip("compressed_tensors")
    done = tigon("export", saved(tmp_path / "source", tie_word_embeddings=tied), tmp_path / "out", "--format", name)
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if "with compressed-tensors" in line]
    difference = float(re.search(r"logits differ by ([\d.]+)%", line)[1])
    assert LINE in line and 0.5 < difference < {"fp8": 25}.get(name, 90)
    assert f"vLLM       vllm serve {tmp_path / 'out'}" in done.out
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert size < (tmp_path / "source" / "model.safetensors").stat().st_size


def test_another_scale_in_the_file_is_refused(tigon, tmp_path, monkeypatch):
    pytest.importorskip("compressed_tensors")
    chosen = formats.FORMATS["int4"]
    pack = lambda codes: chosen.pack(codes) | {"weight_scale": codes.scales_RG * 1.01}  # noqa: E731
    monkeypatch.setitem(formats.FORMATS, "int4", replace(chosen, pack=pack))
    line = tigon("export", saved(tmp_path / "source"), tmp_path / "out", "--format", "int4").error_line()
    assert "computes otherwise from the written file" in line and "q_proj.weight" in line
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_config_names_the_format_and_what_is_left_out(tigon, tmp_path):
    out = tmp_path / "out"
    done = tigon("export", saved(tmp_path / "source"), out, "--format", "int4", "--no-verify")
    assert done.code == 0 and "not verified: the files in int4 were not read back" in done.out
    written = json.loads((out / "config.json").read_text())["quantization_config"]
    weights = written["config_groups"]["group_0"]["weights"]
    assert written["ignore"] == ["lm_head"] and written["format"] == "pack-quantized"
    assert (weights["num_bits"], weights["group_size"], weights["strategy"]) == (4, 32, "group")


def test_the_card_of_a_run_names_the_format(tigon, tmp_path):
    source = saved(tmp_path / "source")
    (source / "README.md").write_text("---\ntags: [tigon]\n---\n# mine\n\n## Recipe\n")
    tigon("export", source, tmp_path / "out", "--format", "int4", "--no-verify")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.endswith(
        "## Format\n\nThe linear layers are in int4. Answers can differ from those of the trained model.\n"
    )
    tigon("export", source, tmp_path / "whole", "--no-verify")
    assert (tmp_path / "whole" / "README.md").read_text().endswith("## Recipe\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--format", "int5"], "--format int5 is not known; choose one of fp8, int4, mxfp4"),
        (["--format", "int4", "--dtype", "fp16"], "--dtype fp16: --format int4 has scales in bf16"),
        (["--format", "int4", "--gguf", "f16"], "--gguf f16 has its own formats"),
    ],
)
def test_options_that_contradict_the_format_are_refused(tigon, tmp_path, options, words):
    pytest.importorskip("gguf")
    assert words in tigon("export", saved(tmp_path / "source"), tmp_path / "out", *options).error_line()


def test_a_missing_reader_is_named_before_weights_are_loaded(tigon, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_export, "PACKAGE", "no_such_package")
    line = tigon("export", saved(tmp_path / "source"), tmp_path / "out", "--format", "fp8").error_line()
    assert "read back with compressed-tensors" in line and "--no-verify" in line


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("llama", {"intermediate_size": 72}, "down_proj has 72 elements, and int4 needs a multiple of 32"),
        ("mixtral", {"num_local_experts": 2}, "mixtral has experts"),
    ],
)
def test_models_that_the_format_does_not_cover_are_refused(tigon, tmp_path, model_type, changes, words):
    source = saved(tmp_path / "source", model_type, **changes)
    line = tigon("export", source, tmp_path / "out", "--format", "int4", "--no-verify").error_line()
    assert words in line and not (tmp_path / "out").exists()


def test_the_export_of_a_run_with_qat_holds_what_its_loss_saw(tigon, tmp_path, monkeypatch):
    """The adapters are not merged in the run, and are in the export."""
    pytest.importorskip("compressed_tensors")
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "source")
    rows = [{"prompt": "the quick", "completion": "brown fox"}, {"prompt": "lazy", "completion": "dogs"}] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "recipe.yaml").write_text(
        "model: {name: source}\ndata: {source: rows.jsonl, sequence_length: 64, packing: false, eval_fraction: 0}\n"
        "train: {steps: 3, batch_size: 2, learning_rate: 0.01, qat: int4}\nlora: {rank: 4}\noutput: {name: run}\n"
    )
    assert tigon("train", "recipe.yaml").code == 0
    done = tigon("export", "runs/run", "out", "--merge", "--format", "int4")
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if "as its loss saw it, in int4" in line]
    assert float(re.search(r"logits differ by ([\d.]+)%", line)[1]) < 1  # the rounding of W + BA to bf16
    other = tigon("export", "runs/run", "bf16", "--merge", "--no-verify")
    assert "note       the run computed with weights in int4 (train.qat)" in other.out


def test_a_word_of_int4_holds_eight_numbers_from_the_lowest_bits_on():
    codes = formats.Codes(torch.tensor([[[-8.0, -7, -1, 0, 1, 2, 6, 7]]]), torch.ones(1, 1))
    (word,) = formats.FORMATS["int4"].pack(codes)["weight_packed"].flatten().tolist()
    assert [(word >> 4 * i & 15) - 8 for i in range(8)] == [-8, -7, -1, 0, 1, 2, 6, 7]
