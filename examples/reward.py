"""Train on a reward: the model generates samples, a function scores them, and training makes samples with higher
scores more likely.

    python examples/reward.py --config run.toml --prompt "1 2 3"

Policy gradient on groups of samples (Williams 1992; the baseline is the group's mean, as in GRPO, Shao et al. 2024):
loss = - advantage x log p(sample), averaged over samples. The TOML file sets `load` (the model to train), `seq_length`,
`micro_batch`, `steps`, `lr`, and any layout without context parallelism. Replace the reward, which counts even token
ids.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

import mega


def even_tokens(sample: Sequence[int]) -> float:
    return sum(token % 2 == 0 for token in sample) / max(len(sample), 1)


def policy_loss(advantages: torch.Tensor) -> Callable[[mega.Predictions, mega.DecoderBatch], torch.Tensor]:
    return lambda predictions, batch: -advantages * (predictions.logprobs * batch.loss_weights).sum(1)


def reinforce(
    run: mega.Options, prompt: list[int], reward: Callable[[Sequence[int]], float], tokens: int = 16, group: int = 8
) -> list[float]:
    """Train to the end of `run`, and return the mean reward of each step's samples. Errors: ValueError if no step is
    left."""
    rewards = []
    with mega.Trainer(run) as trainer:
        if trainer.steps_done >= trainer.steps:
            raise ValueError(f"steps {trainer.steps}: must be more than the {trainer.steps_done} that `load` has done")
        while trainer.steps_done < trainer.steps:
            seeds = range(trainer.steps_done * group, (trainer.steps_done + 1) * group)
            samples = [trainer.sample(prompt, tokens, temperature=1.0, top_k=0, seed=seed) for seed in seeds]
            rewards_of_samples = torch.tensor([reward(sample) for sample in samples])
            advantages = (rewards_of_samples - rewards_of_samples.mean()) / (rewards_of_samples.std() + 1e-4)
            rows = torch.tensor([[*prompt, *sample, *[0] * (tokens - len(sample))] for sample in samples])
            ends = torch.tensor([[len(prompt) + len(sample)] for sample in samples])
            positions = torch.arange(1, rows.shape[1])[None]
            batch = trainer.batch(rows, weights=(positions >= len(prompt)) & (positions < ends))
            trainer.forward_backward(batch, policy_loss(advantages.to(trainer.device)), level="sequence")
            trainer.step()
            rewards.append(float(rewards_of_samples.mean()))
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="a run as TOML")
    parser.add_argument("--prompt", required=True, help="token ids")
    given = parser.parse_args()
    run = mega.config(file=given.config, finetune=True, use_checkpoint_config=True)
    print(reinforce(run, list(map(int, given.prompt.split())), even_tokens))
