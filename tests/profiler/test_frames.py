"""Which lines of Python are shown for an allocation."""

from __future__ import annotations

import sys

import pytest

from tigon.profiler.recording.frames import KEPT_FRAMES, readable, short_path

SITE = "/env/lib/python3.12/site-packages/"


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (f"{SITE}torch/nn/functional.py", "torch/nn/functional.py"),
        ("/usr/lib/python3.11/random.py", "random.py"),
        ("/home/ada/tigon/src/tigon/ops/glu.py", "tigon/ops/glu.py"),
        ("/home/ada/secret-project/run/train.py", "run/train.py"),
        ("C:\\env\\Lib\\site-packages\\torch\\nn\\functional.py", "torch/nn/functional.py"),
        ("train.py", "train.py"),
        ("<stdin>", "<stdin>"),
    ],
)
def test_short_path_says_nothing_of_the_machine(path, shown):
    assert short_path(path) == shown


def lines(*paths):
    return readable((path, 1, "f") for path in paths)


def test_call_machinery_is_hidden():
    machinery = [
        f"{SITE}torch/_compile.py",
        f"{SITE}torch/nn/modules/module.py",
        f"{SITE}accelerate/utils/operations.py",
    ]
    assert lines(*machinery, "/x/src/tigon/profiler/recording/cpu.py", "<string>", "/a/b/mine.py") == ("b/mine.py:1 f",)


def test_callers_of_the_training_loop_are_hidden():
    model, loop, outside = f"{SITE}transformers/models/llama.py", f"{SITE}transformers/trainer.py", "/a/b/run.py"
    assert lines(model, loop, outside) == ("transformers/models/llama.py:1 f",)
    assert lines(loop, outside) == ("transformers/trainer.py:1 f",), "what the loop itself allocates"
    assert lines(f"{SITE}torch/autograd/graph.py", loop, outside) == (), "the backward's node says more"


def test_deep_stack_is_cut_to_a_few_frames():
    assert len(lines(*["/a/b/mine.py"] * 50)) == KEPT_FRAMES
    here = sys._getframe()
    assert readable([(here.f_code.co_filename, here.f_lineno, here.f_code.co_name)])[0].endswith("few_frames")
