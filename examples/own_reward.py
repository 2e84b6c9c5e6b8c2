"""Your own reward in a recipe: two functions with weights, a run of `tigon train`, and the curve of each function.

`even_share` below pays for even numbers. `tigon.rewards:length`, which tigon brings, pays for short answers.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = """
model: {name: MODEL}
data: {source: rows.jsonl, sequence_length: 16, eval_fraction: 0}
train: {objective: grpo, steps: 20, batch_size: 16, learning_rate: 1.0e-2, weight_decay: 0, log_steps: 1}
post_training:
  rewards:
    - own_reward:even_share
    - {function: tigon.rewards:length, weight: 0.2, arguments: {most: 6}}
  generations: 8
  completion_length: 8
output: {name: even, sample_tokens: 0, save_model: false}
"""


def even_share(completions: list[str], **columns: object) -> list[float]:
    """The share of even numbers in each completion. A column of the rows would be another argument, by its name."""
    words = [completion.split() for completion in completions]
    return [sum(word.isdigit() and int(word) % 2 == 0 for word in answer) / max(1, len(answer)) for answer in words]


if __name__ == "__main__":
    from tiny import checkpoint, rows

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = [json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows()]
        (folder / "rows.jsonl").write_text("".join(prompts), encoding="utf-8")
        (folder / "recipe.yaml").write_text(RECIPE.replace("MODEL", checkpoint()), encoding="utf-8")
        shutil.copy(__file__, folder)  # the recipe finds modules of the current folder
        paths = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "tigon", "train", "recipe.yaml"]
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        lines = (folder / "runs" / "even" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()

    records = [record for record in map(json.loads, lines) if record["event"] == "train"]
    means = {}
    for metric in ("reward", "rewards/even_share/mean", "rewards/length/mean"):
        values = [record[metric] for record in records]
        means[metric] = (sum(values[:5]) / 5, sum(values[-5:]) / 5)
        print(f"{metric}: mean of 5 steps {means[metric][0]:.2f} -> {means[metric][1]:.2f}")
    assert means["reward"][1] > means["reward"][0]
