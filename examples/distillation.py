"""Distillation: a student learns a teacher's distribution over each next token (Hinton et al. 2015).

    python examples/distillation.py --teacher runs/large --config student.toml

loss = share T^2 KL(teacher || student), both at temperature T, + (1 - share) x the usual loss. The teacher runs on
every rank of the last pipeline stage; the student may have any layout without context parallelism, and may
run under torchrun.
"""

from __future__ import annotations

import argparse

import torch

import mega


def distil(teacher: str, run: mega.Options, temperature: float = 2.0, share: float = 0.9) -> list[mega.StepResult]:
    """Train to the end of `run`, and save a checkpoint if the run has `save`."""
    large, steps = mega.load(teacher), list[mega.StepResult]()

    def loss(predictions: mega.Predictions, batch: mega.DecoderBatch) -> torch.Tensor:
        target = torch.log_softmax(large.logits(batch.tokens).float() / temperature, -1)
        student = torch.log_softmax(predictions.logits.float() / temperature, -1)
        divergence = (target.exp() * (target - student)).sum(-1)
        return share * temperature**2 * divergence - (1 - share) * predictions.logprobs

    with mega.Trainer(run) as trainer:
        for batches in trainer.batches():
            trainer.forward_backward(batches, loss)
            steps.append(trainer.step())
            if trainer.rank == 0:
                print(f"step {steps[-1].step} | loss {steps[-1].loss:.4f}")
        if run.checkpoint.save is not None:
            trainer.save()
    return steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--teacher", required=True, help="any model that mega.load opens, with the same tokenizer")
    parser.add_argument("--config", required=True, help="the student's run as TOML: model, data, steps, learning rate")
    given = parser.parse_args()
    distil(given.teacher, mega.config(file=given.config))
