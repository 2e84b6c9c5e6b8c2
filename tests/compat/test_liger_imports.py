"""`import liger_kernel` after `install`, the script runner, Trainer(use_liger_kernel=True): each in its own process.

Processes, because the answers live in `sys.modules` and in caches of transformers; copies of this one where it does not
matter what has been imported before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import forks
import tigon

pytestmark = forks.forks

# The path is absolute because the processes run in other folders.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tigon.__file__).parent.parent)}

MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=97,
)
"""


def python(code: str, *, cwd: Path | None = None) -> str:
    done = forks.python(code=code, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_installed_names_resolve() -> None:
    out = python("""
from tigon.compat import liger
liger.install()
liger.install()
import importlib.metadata, importlib.util
import liger_kernel.transformers.functional as F
from liger_kernel.transformers import LigerRMSNorm, apply_liger_kernel_to_gemma3_text, AutoLigerKernelForCausalLM
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance
from liger_kernel.transformers.trainer_integration import _apply_liger_kernel
from liger_kernel.ops import LigerRMSNormFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction as same
from liger_kernel.utils import infer_device
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss
from liger_kernel.chunked_loss.functional import liger_fused_linear_kto
from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearDPOFunction
from liger_kernel.transformers import LigerJSD, LigerKLDIVLoss, LigerTVDLoss, LigerFusedLinearJSD
from liger_kernel.transformers.grpo_loss import triton_grpo_loss, fused_selective_log_softmax
from liger_kernel.ops import GrpoLossFunction, LigerFusedLinearJSDFunction
import liger_kernel
assert same is LigerRMSNormFunction and LigerRMSNorm is liger.LigerRMSNorm
assert F.liger_rms_norm.__module__ == "tigon.compat.liger.layers"
assert "LigerRMSNorm" in dir(liger_kernel.transformers)
scope = {}
exec("from liger_kernel.transformers.functional import *", scope)
assert "liger_swiglu" in scope
assert importlib.util.find_spec("liger_kernel") is not None
print(liger_kernel.__version__, importlib.metadata.version("liger-kernel"), importlib.metadata.version("liger_kernel"))
""")
    assert out.split() == ["0.8.5+tigon"] * 3


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("from liger_kernel.megatron import LigerMegatronRMSNorm", "megatron.LigerMegatronRMSNorm"),
        ("from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase", "fused_linear_ppo"),
        ("from liger_kernel.transformers.trainer import LigerORPOTrainer", "liger_kernel.transformers.trainer"),
        ("from liger_kernel.ops import jsd_forward", "liger_kernel.ops.jsd_forward"),
        ("from liger_kernel.transformers.dyt import LigerDyT", "Use `gamma * torch.tanh(alpha * x) + beta`"),
        ("import liger_kernel.megatron.swiglu", "liger_kernel.megatron.swiglu"),
        ("from liger_kernel.ops.rms_norm import _rms_norm_forward_kernel", "rms_norm._rms_norm_forward_kernel"),
    ],
)
def test_import_of_a_missing_name_is_refused_by_name(statement: str, name: str) -> None:
    out = python(f"""
from tigon.compat import liger
liger.install()
try:
    {statement}
except ImportError as error:
    assert isinstance(error, liger.NotInTigon), repr(error)
    print(error)
""")
    assert out.startswith("tigon has no counterpart of liger_kernel.") and name in out


def test_missing_attribute_raises_an_attribute_error_with_its_name() -> None:
    out = python("""
from tigon.compat import liger
liger.install()
import liger_kernel.transformers as transformers
assert not hasattr(transformers, "LigerORPOTrainer")
assert getattr(transformers, "LigerCausalLMOutputWithPast", None) is None
try:
    transformers.LigerORPOTrainer
except AttributeError as error:
    print(error)
""")
    assert "no counterpart of liger_kernel.transformers.LigerORPOTrainer" in out


def test_uninstall_removes_every_trace() -> None:
    python("""
import sys
from transformers.utils import is_liger_kernel_available
meta_path, modules = list(sys.meta_path), set(sys.modules)
assert not is_liger_kernel_available()
from tigon.compat import liger
liger.install()
assert is_liger_kernel_available()
import liger_kernel.ops.rope
liger.uninstall()
liger.uninstall()
assert sys.meta_path == meta_path
assert not any(name.split(".")[0] == "liger_kernel" for name in sys.modules)
assert not is_liger_kernel_available()
try:
    import liger_kernel
except ModuleNotFoundError as error:
    assert error.name == "liger_kernel" and not isinstance(error, liger.NotInTigon)
else:
    raise AssertionError
""")


def test_real_liger_is_shadowed_only_if_it_is_not_imported_yet(tmp_path: Path) -> None:
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").write_text("real = True\n")
    out = python(
        """
import sys
sys.path.insert(0, ".")
import liger_kernel
from tigon.compat import liger
from tigon.errors import UsageError
before = list(sys.meta_path)
try:
    liger.install()
except UsageError as error:
    print(error)
assert sys.meta_path == before and sys.modules["liger_kernel"].real
del sys.modules["liger_kernel"]
liger.install()          # not imported yet: shadowed
import liger_kernel
assert not hasattr(liger_kernel, "real")
liger.uninstall()
import liger_kernel      # and back
assert liger_kernel.real
""",
        cwd=tmp_path,
    )
    assert "imported already" in out and str(tmp_path) in out


def test_importing_the_names_does_not_import_transformers() -> None:
    code = """
import sys
from tigon.compat.liger import LigerRMSNorm, apply_liger_kernel_to_llama, install
print("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stdout.strip() == "False"


TRAINER = """
import os, sys, torch, warnings
from transformers import Trainer, TrainingArguments

def losses(model, **arguments):
    ids = torch.randint(0, 97, (8, 12), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": r, "labels": r} for r in ids]
    args = TrainingArguments(
        output_dir=sys.argv[1] if len(sys.argv) > 1 else "out", max_steps=3, per_device_train_batch_size=4,
        logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=3, **arguments,
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] + [evaluated]

def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(config)
"""


def test_trainer_with_use_liger_kernel_trains_to_the_same_losses(tmp_path: Path) -> None:
    """transformers' own check ran before `install`, so its cached answer was no."""
    out = python(
        MODEL
        + TRAINER
        + """
plain = losses(build())
try:
    losses(build(), use_liger_kernel=True)
except ImportError:
    pass
else:
    raise AssertionError
from tigon.compat import liger
liger.install()
model = build()
fused = losses(model, use_liger_kernel=True, liger_kernel_config={"rope": False})
from tigon.models.seams.base import PatchedModule
assert isinstance(model.lm_head, PatchedModule) and isinstance(model.model.norm, PatchedModule)
assert not isinstance(model.model.layers[0].self_attn, PatchedModule)
torch.testing.assert_close(torch.tensor(fused), torch.tensor(plain), rtol=1e-4, atol=1e-4)
assert len(fused) == 4
print("ok")
""",
        cwd=tmp_path,
    )
    assert out.strip().endswith("ok")


# --- the script runner ------------------------------------------------------------------------------------------------


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return forks.python(*arguments, module="tigon.compat.liger", cwd=cwd)


def test_liger_script_runs_unmodified(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("ANSWER = 42\n")
    (tmp_path / "train.py").write_text(
        MODEL
        + TRAINER
        + """
import beside
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss
from liger_kernel.transformers import apply_liger_kernel_to_llama, LigerFusedLinearCrossEntropyLoss

def main():
    apply_liger_kernel_to_llama(rope=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=True)
    first, *_, last = losses(build(), use_liger_kernel=True)
    print("ARGS", sys.argv, __name__, __file__, beside.ANSWER)
    loss = LigerFusedLinearCrossEntropyLoss()(torch.randn(5, 4), torch.randn(3, 4), torch.tensor([0, 4, -100]))
    assert loss.isfinite() and first != last
    head, hidden = torch.randn(5, 4), torch.randn(4, 6, 4, requires_grad=True)
    loss, (chosen_logps, *_) = LigerFusedLinearDPOLoss(use_ref_model=False)(head, hidden, torch.randint(5, (4, 6)))
    loss.backward()
    assert loss.isfinite() and hidden.grad.any() and chosen_logps.shape == (2,)

if __name__ == "__main__":
    main()
    sys.exit(7)
"""
    )
    (tmp_path / "elsewhere").mkdir()
    done = run("../train.py", "out", "--flag", cwd=tmp_path / "elsewhere")
    assert done.returncode == 7, done.stderr[-3000:]
    assert "ARGS ['../train.py', 'out', '--flag'] __main__ ../train.py 42" in done.stdout


def test_exit_code_of_the_script_is_returned(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("import liger_kernel\n")
    (tmp_path / "bad.py").write_text("raise RuntimeError('out of luck')\n")
    assert run("good.py", cwd=tmp_path).returncode == 0
    command = [sys.executable, "-m", "tigon.compat.liger", "bad.py"]  # once as a shell starts it
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 1 and "RuntimeError: out of luck" in done.stderr


@pytest.mark.parametrize("arguments", [(), ("nowhere.py",), (".",)])
def test_wrong_command_line_prints_the_usage_in_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "usage: python -m tigon.compat.liger" in done.stderr
    assert ("tigon: SCRIPT.py is missing. " in done.stderr) == (not arguments)
    assert run("--help", cwd=tmp_path).returncode == 0


def test_loss_dtype_option_reaches_the_script_and_not_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "compare.py").write_text("""
import sys, torch
from liger_kernel.transformers import LigerCrossEntropyLoss
assert sys.argv == ["compare.py", "--loss-dtype", "mine"], sys.argv
logits, labels = torch.randn(8, 20, dtype=torch.bfloat16), torch.randint(20, (8,))
loss, plain = LigerCrossEntropyLoss()(logits, labels), torch.nn.functional.cross_entropy(logits, labels)
print(loss.dtype, torch.allclose(loss, plain, rtol=2e-2) if loss.dtype == plain.dtype else "")
""")
    script = ("compare.py", "--loss-dtype", "mine")
    assert run(*script, cwd=tmp_path).stdout.split() == ["torch.float32"]
    assert run("--loss-dtype", "logits", *script, cwd=tmp_path).stdout.split() == ["torch.bfloat16", "True"]
    assert run("--loss-dtype=liger", *script, cwd=tmp_path).stdout.split() == ["torch.bfloat16", "True"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--loss-dtype",), "--loss-dtype: expected one argument"),
        (("--loss-dtype", "bf16", "there.py"), "loss_dtype='bf16' is not known; choose one of fp32, logits, liger"),
        (("--loss-type", "fp32", "there.py"), "unrecognized arguments: --loss-type"),
    ],
)
def test_wrong_loss_dtype_is_refused_in_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text("raise SystemExit('ran')\n")
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and message in done.stderr


def test_reloaded_and_reimported_modeling_modules_are_patched_again() -> None:
    python(
        MODEL
        + """
import importlib, sys
import transformers.loss.loss_utils
from tigon.compat import liger
from tigon.models.seams.base import PatchedModule
from transformers import AutoModelForCausalLM

NAME = "transformers.models.llama.modeling_llama"

def patched(cls):
    return sum(isinstance(module, PatchedModule) for module in cls(config).modules())

liger.apply_liger_kernel_to_llama()
full = patched(LlamaForCausalLM)
assert full == 12  # 5 norms, 2 MLPs, 2 attentions, the head, the model and its trunk

importlib.reload(sys.modules[NAME])  # how scripts take Liger's patch back
assert patched(sys.modules[NAME].LlamaForCausalLM) == 0
liger.apply_liger_kernel_to_llama()
assert patched(sys.modules[NAME].LlamaForCausalLM) == patched(LlamaForCausalLM) == full

del sys.modules[NAME]
again = importlib.import_module(NAME)
assert patched(again.LlamaForCausalLM) == 0
liger.apply_liger_kernel_to_llama()
assert patched(again.LlamaForCausalLM) == full
assert patched(again.LlamaModel) == full - 2
assert sum(isinstance(m, PatchedModule) for m in AutoModelForCausalLM.from_config(config).modules()) == full

importlib.reload(transformers.loss.loss_utils)
assert patched(again.LlamaForCausalLM) == full
assert liger.remove_hooks() and patched(again.LlamaForCausalLM) == patched(LlamaForCausalLM) == 0
"""
    )
