"""Training towards a reward: the model writes, a function judges, and what it judges better becomes likelier.

    python examples/reward.py --config run.toml --prompt "1 2 3"

Policy gradient on groups of samples (Williams 1992; the baseline is the group's mean, as of GRPO, Shao et al. 2024):
loss = - advantage x log p(sample), a mean over samples. The TOML file has `load`, the model that learns, `seq_length`,
`micro_batch`, `steps`, `lr` and any layout but context parallelism. The reward here counts even token ids: replace it.
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
    """Trains to the end of `run`; the mean reward of each step's samples. Errors: ValueError where it is there."""
    rewards = []
    with mega.Trainer(run) as trainer:
        if trainer.steps_done >= trainer.steps:
            raise ValueError(f"steps {trainer.steps}: must be more than the {trainer.steps_done} that `load` has done")
        while trainer.steps_done < trainer.steps:
            seeds = range(trainer.steps_done * group, (trainer.steps_done + 1) * group)
            samples = [trainer.sample(prompt, tokens, temperature=1.0, top_k=0, seed=seed) for seed in seeds]
            judged = torch.tensor([reward(sample) for sample in samples])
            advantages = (judged - judged.mean()) / (judged.std() + 1e-4)
            rows = torch.tensor([[*prompt, *sample, *[0] * (tokens - len(sample))] for sample in samples])
            ends = torch.tensor([[len(prompt) + len(sample)] for sample in samples])
            places = torch.arange(1, rows.shape[1])[None]
            batch = trainer.batch(rows, weights=(places >= len(prompt)) & (places < ends))
            trainer.forward_backward(batch, policy_loss(advantages.to(trainer.device)), level="sequence")
            trainer.step()
            rewards.append(float(judged.mean()))
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="a run as TOML")
    parser.add_argument("--prompt", required=True, help="token ids")
    given = parser.parse_args()
    run = mega.config(file=given.config, finetune=True, use_checkpoint_config=True)
    print(reinforce(run, list(map(int, given.prompt.split())), even_tokens))
