"""TRL's trainers with tigon's fused head: one line after the trainer is built.

    trainer = trl.DPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)
    tigon.integrations.trl.fuse(trainer)
    trainer.train()

TRL computes its losses from log-probabilities per token. `fuse` gives these trainers `tigon.linear_logprobs` and
`tigon.linear_kl` for them; TRL's own code keeps doing everything else. docs/trainers.md lists what is fused.
"""

from __future__ import annotations

from tigon.integrations.trl.fuse import FusedTrainer, fuse
from tigon.integrations.trl.generation import GraphGeneration, decode_in_graphs
from tigon.integrations.trl.head import UnfusedWarning

__all__ = ["FusedTrainer", "GraphGeneration", "UnfusedWarning", "decode_in_graphs", "fuse"]
