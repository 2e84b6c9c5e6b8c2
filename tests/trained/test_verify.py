"""An export is read back and compared with the trained model; whatever differs refuses it and leaves nothing."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from trained_models import TEMPLATE

from tigon.trained import export


def spoil(monkeypatch, change):
    """Have `change` alter the folder after the weights and the tokenizer are saved in it."""
    original = export._save

    def save(model, tokenizer, trained, folder, **more):
        original(model, tokenizer, trained, folder, **more)
        change(folder)

    monkeypatch.setattr(export, "_save", save)


def edit_json(name, **changes):
    def change(folder):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | changes))

    return change


def scale_weight(folder):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"] *= 1.5
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def nudge_weight(folder):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    weight = state["model.layers.0.self_attn.o_proj.weight"]
    weight.view(-1)[weight.abs().argmin()] *= 1.5  # too little to show in an output
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def write_template(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<end>", "<user>"))


FAULTS = {
    "a wrong weight": (scale_weight, "layer 1 is the first that differs", "mlp.down_proj.weight"),
    "one value of a weight": (nudge_weight, "reads other weights than were written", "self_attn.o_proj.weight"),
    "a wrong config": (edit_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": 2.0}),
                       "layer 0 is the first that differs", "its config differs"),
    "another chat template": (write_template, "another chat template", "transformers 5"),
    "another stop token": (edit_json("tokenizer_config.json", eos_token="<user>"), "reads eos_token_id 2", "it is 1"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_an_export_that_reads_back_otherwise_is_refused_and_leaves_nothing(
    tigon, adapter, tmp_path, monkeypatch, fault
):
    change, *named = FAULTS[fault]
    spoil(monkeypatch, change)
    done = tigon("export", adapter, tmp_path / "out", "--merge")
    line = done.err.splitlines()[-1]  # the first says that PEFT's model card is left out
    assert done.code == 2 and line.startswith("tigon: ")
    assert all(words in line for words in named) and "--no-verify" in line
    assert not list(tmp_path.iterdir())


def test_stop_tokens_of_the_generation_config_are_compared(tigon, checkpoint, tmp_path, monkeypatch):
    shutil.copytree(checkpoint, tmp_path / "source")
    edit_json("generation_config.json", eos_token_id=[1, 3])(tmp_path / "source")
    assert tigon("export", tmp_path / "source", tmp_path / "kept").code == 0
    spoil(monkeypatch, edit_json("generation_config.json", eos_token_id=[1]))
    assert (
        "does not end an answer at '<assistant>'" in tigon("export", tmp_path / "source", tmp_path / "o").error_line()
    )


def test_a_merge_that_leaves_an_adapter_out_is_refused(tigon, adapter, tmp_path, monkeypatch):
    original = export.merged

    def merge_but_one(wrapped):
        module = next(m for name, m in wrapped.named_modules() if name.endswith("layers.1.self_attn.v_proj"))
        module.scaling["default"] = 0.0
        return original(wrapped)

    monkeypatch.setattr(export, "merged", merge_but_one)
    line = tigon("export", adapter, tmp_path / "out", "--merge").error_line()
    assert "compute otherwise than the trained model: layer 1 is the first" in line


def test_a_verified_merge_says_what_agrees_and_by_how_much_the_logits_differ(tigon, adapter, tmp_path):
    done = tigon("export", adapter, tmp_path / "out", "--merge", "--dtype", "fp32")
    (line,) = [line for line in done.out.splitlines() if line.startswith("verified by transformers 5")]
    assert "weights, tokens, chat template and stop tokens agree" in line
    same, n_tokens = (int(line.split(word)[0].split()[-1]) for word in (" of ", " next tokens"))
    assert same == n_tokens > 100 and "logits differ by 0.00%" in line and "the adapters change them by" in line


def test_what_is_not_verified_is_said_in_one_line(tigon, adapter, tmp_path, monkeypatch):
    spoil(monkeypatch, write_template)
    done = tigon("export", adapter, tmp_path / "out", "--merge", "--no-verify")
    assert done.code == 0 and [line for line in done.out.splitlines() if line.startswith("not verified: ")]


def test_copied_adapters_are_compared_on_request(tigon, adapter, tmp_path, monkeypatch):
    done = tigon("export", adapter, tmp_path / "plain")
    assert done.code == 0 and "--verify has PEFT load them" in done.out
    done = tigon("export", adapter, tmp_path / "checked", "--verify")
    assert done.code == 0 and "verified by peft 0" in done.out and "logits differ by 0.00%" in done.out
    original = export._copy_adapters

    def copy_otherwise(source, folder):
        original(source, folder)
        edit_json("adapter_config.json", lora_alpha=1)(folder)

    monkeypatch.setattr(export, "_copy_adapters", copy_otherwise)
    line = tigon("export", adapter, tmp_path / "wrong", "--verify").error_line()
    assert "layer 0 is the first that differs" in line and not (tmp_path / "wrong").exists()


def reward_scores(model, prompt):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([prompt])).logits.float()


def test_a_merged_reward_model_is_compared_by_the_scores_of_its_tokens(tigon, reward_adapter, checkpoint, tmp_path):
    import peft
    from transformers import AutoModelForSequenceClassification

    done = tigon("export", reward_adapter, tmp_path / "out", "--merge")
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if line.startswith("verified by transformers 5")]
    assert "scores differ by" in line and "next tokens" not in line and "the adapters change them by" in line
    merged = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "out"), dtype=torch.float32)
    base = AutoModelForSequenceClassification.from_pretrained(str(checkpoint), num_labels=1, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, str(reward_adapter))
    ours, theirs = (reward_scores(model, [7, 30, 50, 9]) for model in (merged, adapted))
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_a_score_near_zero_refuses_no_merge(tigon, reward_adapter, tmp_path):
    from safetensors.torch import load_file, save_file

    from tigon.trained import behaviour, find, load, probes, verify

    shutil.copytree(reward_adapter, tmp_path / "adapter")
    loaded = load.load(find.find(str(reward_adapter)), device=torch.device("cpu"))
    prompts = verify.Verification(loaded.tokenizer, probes.probes_of(None, loaded.tokenizer)).prompts
    last = behaviour.observe(loaded.model, prompts).hidden[0][-2][-1]
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    state = load_file(file)
    (name,) = [name for name in state if "score" in name]
    state[name] = state[name].float()
    state[name] -= (state[name] @ last) * last / last.norm() ** 2
    save_file(state, file, {"format": "pt"})
    done = tigon("export", tmp_path / "adapter", tmp_path / "out", "--merge")
    assert done.code == 0, done.err


@pytest.mark.parametrize("pad", [0, None, 5])
def test_a_prompts_score_does_not_depend_on_the_padding_beside_it(reward_adapter, pad):
    from tigon.trained import find, load
    from tigon.trained.behaviour import observe

    model = load.load(find.find(str(reward_adapter)), device=torch.device("cpu")).model
    model.config.pad_token_id = pad
    short = [7, 30, 50, 9]
    together, alone = observe(model, [short, [8, 31, 51, 10, 11, 12]]), observe(model, [short])
    assert together.problem is None and together.hidden[0][-1].shape == (4, 1)
    for one, other in zip(together.hidden[0], alone.hidden[0], strict=True):
        torch.testing.assert_close(one, other)


def test_a_merge_that_leaves_the_score_out_is_refused(tigon, reward_adapter, tmp_path, monkeypatch):
    original = export.merged

    def merge_but_score(wrapped):
        model = original(wrapped)
        torch.nn.init.normal_(model.score.weight, std=0.3)
        return model

    monkeypatch.setattr(export, "merged", merge_but_score)
    line = tigon("export", reward_adapter, tmp_path / "out", "--merge").error_line()
    assert "compute otherwise than the trained model: the head is the first" in line


def test_copied_adapters_of_a_reward_model_are_compared(tigon, reward_adapter, tmp_path, monkeypatch):
    done = tigon("export", reward_adapter, tmp_path / "checked", "--verify")
    assert done.code == 0 and "verified by peft 0" in done.out and "scores differ by 0.00%" in done.out, done.err
    original = export._copy_adapters

    def copy_otherwise(source, folder):
        original(source, folder)
        edit_json("adapter_config.json", lora_alpha=1)(folder)

    monkeypatch.setattr(export, "_copy_adapters", copy_otherwise)
    assert "layer 0 is the first" in tigon("export", reward_adapter, tmp_path / "o", "--verify").error_line()


def test_the_tokenizer_beside_copied_adapters_is_compared_and_its_absence_said(
    tigon, adapter, checkpoint, tmp_path, monkeypatch
):
    done = tigon("export", adapter, tmp_path / "without", "--verify")
    assert done.code == 0 and "weights agree; the folder has no tokenizer; " in done.out
    source = tmp_path / "source"
    shutil.copytree(adapter, source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(checkpoint / name, source)
    done = tigon("export", source, tmp_path / "with", "--verify")
    assert done.code == 0 and "weights, tokens, chat template and stop tokens agree" in done.out, done.err
    original = export._copy_adapters
    for fault, named in ((write_template, "another chat template"), (FAULTS["another stop token"][0], "eos_token_id")):

        def copy_otherwise(source, folder, fault=fault):
            original(source, folder)
            fault(folder)

        monkeypatch.setattr(export, "_copy_adapters", copy_otherwise)
        line = tigon("export", source, tmp_path / "wrong", "--verify").error_line()
        assert named in line and not (tmp_path / "wrong").exists()


def test_the_written_weights_leave_memory_before_they_are_read_back(tigon, adapter, tmp_path, monkeypatch):
    models, original, read = [], export._save, export.readers.of_transformers
    monkeypatch.setattr(
        export, "_save", lambda model, *rest, **more: (models.append(model), original(model, *rest, **more))
    )

    def of_transformers(model_class, folder):
        assert all(p.is_meta for p in models[0].parameters())
        return read(model_class, folder)

    monkeypatch.setattr(export.readers, "of_transformers", of_transformers)
    done = tigon("export", adapter, tmp_path / "out", "--merge")
    assert models and done.code == 0 and "logits differ by" in done.out


def test_the_prompts_are_the_runs_data_and_built_in_ones_are_named_if_it_has_moved(tigon, run, checkpoint, tmp_path):
    shutil.copytree(checkpoint, run / "model")
    data = tmp_path / "mine.jsonl"
    data.write_text(json.dumps({"prompt": "Who?", "completion": "You."}) + "\n")
    recipe = f"model: {{name: {checkpoint}}}\ndata: {{source: {data}}}\ntrain: {{steps: 1}}\n"
    (run / "recipe.yaml").write_text(recipe)
    done = tigon("export", run, tmp_path / "one")
    assert done.code == 0 and done.err == "" and "next tokens on the run's data" in done.out
    data.unlink()
    done = tigon("export", run, tmp_path / "two")
    assert done.code == 0 and "next tokens on tigon's own texts" in done.out
    assert "the run's data are not read" in done.err and str(data) in done.err


@pytest.mark.parametrize("options", [["--merge"], ["--verify"]])
def test_a_run_over_rounded_weights_says_that_its_figures_leave_the_rounding_out(
    tigon, run, adapter, checkpoint, tmp_path, options
):
    shutil.copytree(adapter, run / "adapters")
    plain = tigon("export", run, tmp_path / "plain", *options)
    assert plain.code == 0 and "are those of the trained model" in plain.out and "trained over" not in plain.out
    lora = "lora: {rank: 4, quantize: true, quantize_to: nf4}"
    (run / "recipe.yaml").write_text(f"model: {{name: {checkpoint}}}\ntrain: {{steps: 1}}\n{lora}\n")
    done = tigon("export", run, tmp_path / "out", *options)
    note = "trained over NF4; compared with its 16-bit weights, so the rounding of NF4 is not in these figures"
    assert done.code == 0 and note in done.out and "the trained model" not in done.out, done.err


def test_a_model_that_does_not_run_here_is_compared_by_its_tensors(tigon, checkpoint, tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    def fail(self, **inputs):
        raise RuntimeError("no kernel for this machine")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    done = tigon("export", checkpoint, tmp_path / "out")
    assert (
        done.code == 0
        and "nothing was computed: the model does not run on this machine (RuntimeError: no kernel" in done.out
    )
    spoil(monkeypatch, nudge_weight)
    assert "reads other weights" in tigon("export", checkpoint, tmp_path / "wrong").error_line()


def test_a_checksum_sees_each_value_and_not_the_dtype():
    from tigon.trained.behaviour import checksums

    plain = torch.nn.Linear(3, 2).to(torch.bfloat16)
    before = checksums(plain)
    assert checksums(plain.float()) == before
    plain.weight.data[1, 2] += 1e-3
    assert checksums(plain)["weight"] != before["weight"] and checksums(plain)["bias"] == before["bias"]
