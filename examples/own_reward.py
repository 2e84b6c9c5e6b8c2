"""Your own reward in a recipe: two functions with weights, a run of `tigon train`, and the curve of each function.

`even_share` below pays for even numbers. `tigon.rewards:length`, which tigon brings, pays for short answers.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = """
model: {name: MODEL}
data: {source: FOLDER/rows.jsonl, sequence_length: 16, eval_fraction: 0}
train: {objective: grpo, steps: 20, batch_size: 16, learning_rate: 1.0e-2, weight_decay: 0, log_steps: 1}
post_training:
  rewards:
    - examples.own_reward:even_share
    - {function: tigon.rewards:length, weight: 0.2, arguments: {most: 6}}
  generations: 8
  completion_length: 8
output: {folder: FOLDER/runs, name: even, sample_tokens: 0, save_model: false}
"""
CHECKOUT = Path(__file__).resolve().parents[1]


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
        recipe = RECIPE.replace("MODEL", checkpoint()).replace("FOLDER", name)
        (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
        command = [sys.executable, "-m", "tigon", "train", str(folder / "recipe.yaml")]
        subprocess.run(command, cwd=CHECKOUT, check=True, stdout=subprocess.DEVNULL)  # its modules are those of here
        lines = (folder / "runs" / "even" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()

    records = [record for record in map(json.loads, lines) if record["event"] == "train"]
    means = {}
    for metric in ("reward", "rewards/even_share/mean", "rewards/length/mean"):
        values = [record[metric] for record in records]
        means[metric] = (sum(values[:5]) / 5, sum(values[-5:]) / 5)
        print(f"{metric}: mean of 5 steps {means[metric][0]:.2f} -> {means[metric][1]:.2f}")
    assert means["reward"][1] > means["reward"][0]
