"""The recipe: what it reads, what it refuses, and that the table in docs/recipe.md is the one it generates."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from benchmarks.pages.recipe_keys import reference_table
from tigon.errors import RecipeError
from tigon.objectives.recipe_checks import load
from tigon.recipe.keys import SECTIONS, DataConfig
from tigon.techniques.keys.settings import Settings

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str, *overrides: str, gpu: bool = False):
    return load(write(folder, text), overrides, gpu_present=lambda: gpu)


def test_values_are_typed_and_defaults_fill_the_rest(tmp_path):
    recipe = read(tmp_path, "train: {steps: 3, learning_rate: 1e-3}\ndata: {source: [a.txt, b.txt], max_text_mib: 2}\n")
    assert recipe.train.steps == 3
    assert recipe.train.learning_rate == 0.001 and isinstance(recipe.train.learning_rate, float)
    assert recipe.data.source == ("a.txt", "b.txt")
    assert recipe.data.max_text_mib == 2.0 and isinstance(recipe.data.max_text_mib, float)
    assert recipe.data.vocab_size == DataConfig.vocab_size


def test_one_source_may_be_written_without_a_list(tmp_path):
    assert read(tmp_path, "train: {steps: 1}\ndata: {source: a.txt}").data.source == ("a.txt",)


def test_set_wins_over_on_gpu_which_wins_over_the_file(tmp_path):
    text = "train: {steps: 1, batch_size: 2, seed: 3}\non_gpu: {train: {batch_size: 4, seed: 5}}\n"
    on_cpu = read(tmp_path, text, "train.seed=9")
    on_gpu = read(tmp_path, text, "train.seed=9", gpu=True)
    assert (on_cpu.train.batch_size, on_cpu.train.seed) == (2, 9)
    assert (on_gpu.train.batch_size, on_gpu.train.seed) == (4, 9)
    forced_off = read(tmp_path, text, "train.device=cpu", gpu=True)
    assert forced_off.train.batch_size == 2


def test_on_gpu_epochs_replace_the_steps_of_the_file(tmp_path):
    recipe = read(tmp_path, "train: {steps: 5}\non_gpu: {train: {epochs: 2}}", gpu=True)
    assert (recipe.train.steps, recipe.train.epochs) == (None, 2.0)


def test_a_shape_key_can_be_set_without_losing_the_others(tmp_path):
    text = "train: {steps: 1}\nmodel: {config: {num_hidden_layers: 2}}"
    recipe = read(tmp_path, text, "model.config.vocab_size=600")
    assert recipe.model.config == {"num_hidden_layers": 2, "vocab_size": 600}


def test_none_means_null_where_text_cannot_stand(tmp_path):
    recipe = read(tmp_path, "train: {steps: 1, save_steps: none}\nlora: {rank: None}\ndata: {split: none}")
    assert recipe.train.save_steps is None and recipe.lora.rank is None and recipe.data.split == "none"


def test_warm_up_and_decay_fit_into_fewer_steps(tmp_path):
    text = "train: {epochs: 3, schedule: warmup_stable_decay, warmup_steps: 40, decay_steps: 100, eval_steps: 5}"
    train = read(tmp_path, text).train
    for steps, warmup, decay in ((1, 0, 1), (6, 3, 3), (100, 40, 60), (400, 40, 100)):
        short = train.shortened(steps)
        assert (short.steps, short.warmup_steps, short.decay_steps) == (steps, warmup, decay)
        assert short.epochs is None and short.eval_steps is None
    assert dataclasses.replace(train, decay_steps=None).shortened(6).decay_steps is None


def test_the_resolved_recipe_reads_back_as_itself(tmp_path):
    yaml = pytest.importorskip("yaml")
    recipe = read(tmp_path, "train: {epochs: 1.5}\nmodel: {config: {num_hidden_layers: 2}}\ndata: {source: [a, b]}")
    assert read(tmp_path, yaml.safe_dump(recipe.as_mapping())) == recipe


WRONG = {
    "unknown key": (
        "train: {steps: 1}\ndata:\n  sequence_lenght: 8\n",
        r"r\.yaml:3: data\.sequence_lenght .*nearest key is data\.sequence_length",
    ),
    "key in the wrong section": ("train: {steps: 1, packing: true}", r"train\.packing .*nearest key is data\.packing"),
    "section and key in one word": ("lora_rank: 8", r"lora_rank .*nearest key is lora\.rank"),
    "misspelt key without its section": ("learning_rat: 1.0e-3", r"nearest key is train\.learning_rate"),
    "unknown section": ("trian: {steps: 1}", r"r\.yaml:1: trian .*nearest key is train"),
    "unknown key under on_gpu": (
        "train: {steps: 1}\non_gpu: {train: {batchsize: 2}}",
        r"on_gpu\.train\.batchsize .*on_gpu\.train\.batch_size",
    ),
    "wrong value under on_gpu": (
        "train: {steps: 1}\non_gpu: {train: {batch_size: 0}}",
        r"on_gpu\.train\.batch_size is 0; .*at least 1",
    ),
    "section that is no mapping": ("train: 3", r"train is a section of keys, not an integer"),
    "recipe that is a list": ("- 1", r"a recipe is a mapping of the sections"),
    "text for a number": ("train: {steps: many}", r"r\.yaml:1: train\.steps is 'many', text"),
    "below the limit": ("train: {steps: 1, batch_size: 0}", r"train\.batch_size is 0; it must be at least 1"),
    "outside the choices": (
        "train: {steps: 1, schedule: cosin}",
        r"'cosin'; it must be one of cosine, linear, constant",
    ),
    "decay without its length": (
        "train: {steps: 9, schedule: warmup_stable_decay}",
        r"lowers the learning rate in the last steps; set train\.decay_steps",
    ),
    "decay longer than the run": (
        "train: {steps: 9, schedule: warmup_stable_decay, warmup_steps: 5, decay_steps: 5}",
        r"train\.warmup_steps and train\.decay_steps together exceed train\.steps",
    ),
    "decay of another schedule": (
        "train: {steps: 9, decay_steps: 5}",
        r"train\.decay_steps would do nothing without train\.schedule",
    ),
    "lowest rate of a constant one": (
        "train: {steps: 9, schedule: constant, min_lr_rate: 0.1}",
        r"train\.min_lr_rate is the end of train\.schedule: cosine and warmup_stable_decay",
    ),
    "outside the choices in a list": (
        "comparison: {kernels: [none, no-linear-ce]}\ntrain: {steps: 1}",
        r"comparison\.kernels is 'no-linear-ce'; it must be one of none, no-flce, tigon, liger",
    ),
    "every layer in none": ("train: {steps: 1, checkpointing: every-0}", r"must be one of auto, none, full, .*every-N"),
    "every-N itself": ("train: {steps: 1, checkpointing: every-N}", r"'every-N'; it must be one of"),
    "an excluded pair": (
        "train: {steps: 1, optimizer: galore}\nsharding: {fsdp: true}",
        r"r\.yaml: .*whole matrices; use sharding",
    ),
    "no targets": ("train: {steps: 1}\nlora: {rank: 8, targets: []}", r"r\.yaml:2: lora\.targets is empty; name one"),
    "no kernels to compare": (
        "train: {steps: 1}\ncomparison: {steps: 2, kernels: []}",
        r"comparison\.kernels is empty",
    ),
    "adapters without a rank": (
        "train: {steps: 1}\nlora:\n  alpha: 32\n  targets: [linear]",
        r"r\.yaml:3: lora\.alpha, lora\.targets would do nothing without lora\.rank, .*; add lora\.rank: 16, remove "
        r"them, or keep them without effect with lora\.rank: null",
    ),
    "comparison without steps": (
        "train: {steps: 1}\ncomparison: {batch_size: 4}",
        r"comparison\.batch_size would do nothing without comparison\.steps",
    ),
    "rank of no GaLore": (
        "train: {steps: 1, galore_rank: 64}",
        r"train\.galore_rank would .* train\.optimizer: galore",
    ),
    "resharding of whole weights": (
        "train: {steps: 1}\nsharding: {gpus: 2, reshard: false}",
        r"sharding\.reshard would .* add sharding\.fsdp: true",
    ),
    "merge list": (
        "train:\n  <<: [{steps: 1}, {steps: 2}]",
        r"r\.yaml:2: << takes one mapping, .*; merge one mapping",
    ),
    "repeated key": ("train: {steps: 1, steps: 2}", r"r\.yaml:1: train\.steps is given twice"),
    "steps and epochs": ("train: {steps: 1, epochs: 1}", r"both are given"),
    "neither steps nor epochs": ("train: {seed: 1}", r"neither is given"),
    "name with a path": ("train: {steps: 1}\noutput: {name: ../x}", r"output\.name is '\.\./x'"),
    "name of dots": ("train: {steps: 1}\noutput: {name: ..}", r"output\.name is '\.\.'"),
    "python object": ("train: !!python/object/apply:os.system ['true']", r"not valid YAML"),
    "date that is none": ("output: {folder: 2024-02-30}", r"not valid YAML"),
    "tag of another kind": ("train: {steps: !!bool foo}", r"not valid YAML"),
    "broken YAML": ("train: {steps: 1", r"r\.yaml:\d+: not valid YAML"),
    "deep nesting": ("train: " + "[" * 40 + "]" * 40, r"nested deeper"),
    "alias bomb": (
        "a: &a [x,x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
        "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]",
        r"more than 4096 values",
    ),
    "file too large": ("# " + "x" * 70_000, r"over the limit of 65536 bytes"),
}


KEYS = [(section, f.name, f.metadata, typing.get_type_hints(cls)[f.name]) for section, cls in SECTIONS.items()
        for f in dataclasses.fields(cls)]  # fmt: skip


def of_type(wanted):
    return [
        pytest.param(section, name, id=f"{section}.{name}")
        for section, name, _, hint in KEYS
        if wanted in (typing.get_args(hint) or (hint,))
    ]


def refusal(folder, section, name, written):
    """The loader's message for a recipe with one value only."""
    with pytest.raises(RecipeError) as caught:
        read(folder, f"{section}:\n  {name}: {written}\n")
    line = str(caught.value)
    assert f"{section}.{name} " in line and "\n" not in line and len(line) < 400, line
    return line


@pytest.mark.parametrize("section, name", of_type(float))
def test_every_float_key_refuses_what_training_cannot_hold(tmp_path, section, name):
    for written in (".nan", ".inf", "-.inf", "'nan'", "'inf'", "1e-320", "1.0e+300", "-1.0", "true", "many", "9" * 400):
        refusal(tmp_path, section, name, written)


@pytest.mark.parametrize("section, name", of_type(int))
def test_every_integer_key_has_both_limits(tmp_path, section, name):
    for written in ("-1", "9" * 30, "9" * 4000, "1.0", "true", "'1'", ".nan"):
        refusal(tmp_path, section, name, written)


@pytest.mark.parametrize("section, name", of_type(str))
def test_every_text_key_refuses_what_names_nothing(tmp_path, section, name):
    for written in ("''", "' '", '"a\\0b"', '"\\ud83d"', "3", "true", "{a: b}"):
        refusal(tmp_path, section, name, written)
    if name not in ("sample_prompt", "generate"):  # prompts may have lines
        for written in ('"a\\nb"', "x" * 5000):
            refusal(tmp_path, section, name, written)


@pytest.mark.parametrize("text, message", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_recipe_is_refused_by_name(tmp_path, text, message):
    with pytest.raises(RecipeError, match=message) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_technique_is_switched_off_by_one_key(tmp_path):
    """A resolved recipe has every key, and `on_gpu` keys apply only to GPUs; both can be switched off."""
    text = "train: {steps: 1}\nlora: {rank: 8, alpha: 32}\ncomparison: {kernels: [tigon]}\n"
    text += "on_gpu: {comparison: {steps: 3}}"
    assert read(tmp_path, text).lora.alpha == 32
    assert read(tmp_path, text, "lora.rank=null").lora.rank is None
    assert read(tmp_path, text, "comparison.steps=0", gpu=True).comparison.steps == 0
    with pytest.raises(RecipeError, match=r"--set: heads\.kind would do nothing"):
        read(tmp_path, text, "heads.kind=mtp")


WRONG_SETS = {
    "train.batch_size": r"--set train\.batch_size: expected section\.key=value",
    "=8": "expected section.key=value",
    "batch_size=8": r"--set: batch_size .*nearest key is train\.batch_size",
    "train.batchsize=8": r"--set: train\.batchsize .*nearest key is train\.batch_size",
    "train.batch_size=many": r"--set: train\.batch_size is 'many'",
    "train.batch_size=[": "not valid YAML",
    "output.folder=2024-02-30": "not valid YAML",
    "train.steps.deep=1": r"train\.steps",
}


@pytest.mark.parametrize("override, message", WRONG_SETS.items())
def test_a_wrong_set_is_refused_by_name(tmp_path, override, message):
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, "train: {steps: 1}", override)


def test_missing_and_binary_recipes_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="no such recipe file"):
        load(tmp_path / "none.yaml", gpu_present=lambda: False)
    (tmp_path / "bad.yaml").write_bytes(b"train: \xff")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load(tmp_path / "bad.yaml", gpu_present=lambda: False)


def test_the_recipes_that_come_with_tigon_are_valid_on_both_devices():
    folders = [ROOT / "recipes", *(ROOT / "recipes" / name for name in ("techniques", "medusa", "sums"))]
    found = sorted(path for folder in folders for path in folder.glob("*.yaml") if ".sweep" not in path.name)
    assert len(found) > 30
    for path in found:
        for gpu in (False, True):
            load(path, gpu_present=lambda gpu=gpu: gpu)


def test_the_key_tables_in_the_docs_are_current():
    """If this fails: python -m benchmarks.pages.recipe_keys writes them again."""
    text = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    inside = re.search(r"<!-- recipe keys -->\n(.*?)<!-- end of recipe keys -->", text, re.DOTALL)
    assert inside, "docs/recipe.md lost its markers"
    assert inside[1].strip() == reference_table().strip()


def test_every_technique_of_a_recipe_reaches_its_choices(tmp_path):
    text = """
train: {steps: 1, precision: bf16, optimizer: adamw-8bit, checkpointing: every-3, gradient_accumulation: 2}
model: {kernels: no-flce, attention: eager}
lora: {rank: 8, targets: [linear, head]}
sharding: {gpus: 2, zero: 3}
"""
    settings = read(tmp_path, text).settings()
    assert settings == Settings.of({
        "train.precision": "bf16", "train.optimizer": "adamw-8bit", "train.checkpointing": "every-3",
        "train.gradient_accumulation": 2,
        "model.kernels": "no-flce",
        "model.attention": "eager", "lora.rank": 8, "lora.targets": ("linear", "head"), "sharding.gpus": 2,
        "sharding.zero": 3,
    })  # fmt: skip


def test_auto_precision_is_what_the_machine_says(tmp_path):
    recipe = read(tmp_path, "train: {steps: 1}")
    assert (recipe.settings().train.precision, recipe.settings(precision="fp32").train.precision) == (
        "amp-bf16",
        "fp32",
    )


def test_a_key_beside_a_merge_replaces_the_merged_one(tmp_path):
    """That is what a merge is for."""
    from tigon.objectives.recipe_checks import load

    (tmp_path / "r.yaml").write_text("train:\n  <<: {steps: 1, seed: 5}\n  steps: 2\n", encoding="utf-8")
    train = load(tmp_path / "r.yaml", gpu_present=lambda: False).train
    assert (train.steps, train.seed) == (2, 5)
