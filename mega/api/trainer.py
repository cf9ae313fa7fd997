"""A trainer for your own training loops and losses, with the model, optimizer, data and checkpoints of `mega pretrain`.

    with mega.Trainer(run) as trainer:
        for batches in trainer.batches():
            trainer.forward_backward(batches)
            trainer.step()
        trainer.save()

Each rank of the layout creates one trainer. All ranks must call the same methods in the same order. Between steps,
`mega pretrain` also runs validation, guards against loss spikes, writes metrics and handles signals; a trainer does
not.
"""

from __future__ import annotations

import atexit
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self, overload

import torch

from mega.api.config import with_options
from mega.api.ids import checked_ids
from mega.api.training import check_here, resolved, with_stored_options
from mega.core.architecture import architecture
from mega.core.batch import Batch, DecoderBatch
from mega.core.config.resolve import global_batch_at, microbatches
from mega.core.config.run import Options, updated
from mega.core.device import restored_settings
from mega.core.family import family
from mega.core.inference.request import sampling_of
from mega.core.model.decoder import custom_loss
from mega.core.model.objective import CustomLoss, LossFunction, SequenceBatch
from mega.core.processes.connect import disconnect
from mega.core.processes.world import ranks, world_from_env
from mega.core.terminal import discard
from mega.core.training.sampling import continuation
from mega.core.training.start.rank import StartedRun, begin, open_rank
from mega.core.training.step import backward, means, update

ROWS_OF_STEP = 2**32
"""Number of sample ids reserved per step for rows that the caller makes. Sample ids of the run's data are smaller than
this number."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step, identical on every rank."""

    step: int
    """Index of the step, starting at 1."""
    loss: float
    """Mean loss over the global batch, before the update."""
    grad_norm: float
    """Gradient norm before clipping; NaN if the update was skipped."""
    lr: float
    """The learning rate of the update."""
    applied: bool
    """Whether the weights were updated. False if the loss or the gradients are not finite; weights and moments are then
    unchanged."""


class Trainer:
    """A trainer on one rank of a training run. run: options from `mega.config`; keyword arguments override these
    options.

    As in `mega pretrain`, `resume="auto"` resumes from the newest checkpoint in `save`, if there is one, and `load`
    names the weights to start from. If the options do not specify data, make the batches with `batch`.

    Errors: ValueError naming the option or file, its value and the rule.
    """

    def __init__(self, run: Options, **options: object):
        overridden = with_options(run, options)
        check_here(overridden)
        data = overridden.data
        self._has_data = bool(data.data_path or data.train_data or data.chat_data or data.mock_data)
        self._has_data = self._has_data or overridden.finetuning.task != "lm"
        run_options = with_stored_options(overridden) if self._has_data else updated(overridden, {"mock_data": True})
        if run_options.runtime.cuda_graph is None:
            run_options = updated(run_options, {"cuda_graph": False})  # a captured CUDA graph has a fixed loss
        size = ranks(world_from_env(), None)
        if run_options.runtime.nproc not in (None, size):
            raise ValueError(
                f"nproc {run_options.runtime.nproc}: a trainer is one rank of {size}; mega.launch(function, "
                f"ranks={run_options.runtime.nproc}) starts several"
            )
        self._held = contextlib.ExitStack()
        self._sums: torch.Tensor | None = None
        with contextlib.ExitStack() as opening:
            opening.callback(self._held.close)
            self._held.enter_context(restored_settings())
            inputs, world, device, groups = open_rank(resolved(run_options, size, discard), quiet=True)
            self._begun: StartedRun = begin(inputs, world.rank, world.size, device, groups, self._held, discard)
            self._saver = self._begun.saver(discard)
            opening.pop_all()
        atexit.register(disconnect)
        self.rank: int = world.rank
        """Rank of this process, from 0."""
        self.device: torch.device = device.torch
        """Device of this rank."""
        self.steps: int = self._begun.steps
        """Index of the run's last step, given by the option `steps`."""
        self._drawn = 0
        """Number of rows that `batch` has made in this step, summed over all replicas."""
        self._own_loss = False
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._close(error)

    def close(self) -> None:
        """Wait for a background save, record whether the saved checkpoints are good, unlock the directory of `save`,
        and restore the thread count and the deterministic mode. `close` does not save; call `save` first. Errors: as in
        `save`."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        """Close the trainer. error: the exception that ended the loop early, or None."""
        if self._closed:
            return
        self._closed = True
        progress = self._begun.state.progress
        try:
            if self._saver is not None:
                if isinstance(error, FloatingPointError):
                    self._saver.diverged(str(error))
                at_end = progress.step >= self.steps and progress.skipped < progress.step
                self._saver.finish(clean=error is None and at_end, saves=False)
            self._begun.state.pipeline.close()
        finally:
            self._held.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the trainer is closed")

    @property
    def steps_done(self) -> int:
        """Number of finished steps, including steps before a resume."""
        return self._begun.state.progress.step

    # -- batches

    def batches(self) -> Iterator[list[Batch]]:
        """Yield this rank's microbatches of each remaining step, from the run's data. Call `step` before requesting the
        next step's microbatches.

        Errors: ValueError if the options do not specify data.
        """
        self._check_open()
        task, run, mesh = self._begun.task, self._begun.state.run, self._begun.state.mesh
        if not self._has_data or task.train is None:
            raise ValueError("data_path is missing: give it, or chat_data, or make batches by `batch`")
        progress = self._begun.state.progress
        while progress.step < self.steps:
            count = microbatches(run, mesh.world, global_batch_at(run.batch, progress.consumed))
            yield [batch.to(self.device) for batch in task.train.take(progress.consumed, count)]
            self._check_open()

    def batch(self, tokens: torch.Tensor, weights: torch.Tensor | None = None) -> DecoderBatch:
        """Make a microbatch from your own sequences. The label of each token is the next token.

        tokens: token ids, int64 [b, s + 1]. weights: weight of each predicted token in the loss, [b, s]; default 1; 0
        ignores the label. All ranks of one data-parallel replica must pass the same rows. Different replicas pass
        different rows, but the same number of rows. Dropout depends on the step and on the number of rows already made
        in that step.

        Errors: ValueError naming the argument and the rule.
        """
        self._check_open()
        model = architecture(self._begun.state.run.model)
        positions = model.positions
        if tokens.dim() != 2 or tokens.dtype != torch.int64 or not 2 <= tokens.shape[1] <= positions + 1:
            raise ValueError(
                f"tokens: {tokens.dtype} {list(tokens.shape)}: must be int64 [b, s + 1], s from 1 to {positions}"
            )
        checked_ids("tokens", tokens, model.input.vocab)
        rows, columns = tokens.shape[0], tokens.shape[1] - 1
        token_weights = torch.ones(rows, columns) if weights is None else weights.float()
        if tuple(token_weights.shape) != (rows, columns):
            raise ValueError(f"weights: has shape {list(token_weights.shape)}; must be [{rows}, {columns}]")
        replicas, progress = self._begun.state.mesh.dp, self._begun.state.progress
        # Dropout is a function of the sample id, so every row of a step needs a unique id, which is the same on all
        # ranks of a replica.
        first = (progress.step + 1) * ROWS_OF_STEP + self._drawn + replicas.index * rows
        self._drawn += replicas.size * rows
        microbatch = DecoderBatch(
            tokens=tokens[:, :-1].contiguous(),
            labels=tokens[:, 1:].contiguous(),
            loss_weights=token_weights,
            positions=torch.arange(columns).expand(rows, columns),
            samples=torch.arange(first, first + rows),
        )
        return microbatch.to(self.device)

    # -- a step

    def forward_backward(
        self,
        batches: Batch | Sequence[Batch],
        loss: LossFunction | None = None,
        *,
        level: Literal["token", "sequence"] = "token",
    ) -> float:
        """Compute the gradients of all microbatches of a step, and return the mean loss over the global batch.

        batches: this rank's microbatches; every rank must pass the same number. loss: a function that replaces the
        model's loss. It is called as `loss(predictions, batch)` for each microbatch, on the ranks of the last pipeline
        stage; `predictions.logits` has shape [b, s, vocab], and `predictions.logprobs` [b, s] contains the
        log-probabilities of the labels. At level "token" the function returns losses [b, s], which are averaged with
        the weights of the batch. At level "sequence" the function returns one loss per sequence, [b], or one per group
        of adjacent sequences.

        Errors: ValueError if the loss has a wrong shape, or the model does not support a custom loss.
        """
        self._check_open()
        state = self._begun.state
        # The loss is divided by the weight of the whole step, so all its microbatches must be known before the first
        # backward pass.
        rows = [batches] if not isinstance(batches, Sequence) else list(batches)
        if self._sums is not None:
            raise ValueError(
                "forward_backward: was called before; give all microbatches of a step at once, then step()"
            )
        if not rows:
            raise ValueError("forward_backward: no microbatch was given")
        if level not in ("token", "sequence") or (level == "sequence" and loss is None):
            raise ValueError(f"level {level!r}: must be 'token', or 'sequence' of a loss of your own")
        with contextlib.ExitStack() as replaced_loss:
            if loss is not None:
                _check_loss(self._begun, level)
                if level == "sequence":
                    rows = [SequenceBatch.of(each) for each in rows if isinstance(each, DecoderBatch)]
                replaced_loss.enter_context(custom_loss(state.stages, CustomLoss(loss, level)))
            self._sums = backward(state, rows)
        self._own_loss = loss is not None
        return float(means(state, self._sums.clone())[0])

    def step(self, lr: float | None = None) -> StepResult:
        """Update the weights with the gradients of `forward_backward`. lr: learning rate; by default that of the
        schedule, which counts each step as one global batch of the run.

        Errors: ValueError if `forward_backward` was not called; those of `save`, for a background save.
        """
        self._check_open()
        if lr is not None and not (isinstance(lr, int | float) and 0 <= lr < math.inf):
            raise ValueError(f"lr {lr}: must be a number of at least 0")
        if self._sums is None:
            raise ValueError("step: forward_backward comes first")
        state, sums, self._sums = self._begun.state, self._sums, None
        progress, schedules = state.progress, self._begun.schedules
        # Skipped steps consume data but do not advance the schedule.
        scheduled = progress.consumed - progress.skipped_samples
        rate = schedules.lr(scheduled) if lr is None else lr
        numbers = update(state, sums, rate, schedules.weight_decay(scheduled)).start_reading().numbers()
        applied, samples = bool(numbers["finite"]), global_batch_at(state.run.batch, progress.consumed)
        self._drawn = 0
        progress.step += 1
        progress.consumed += samples
        if not applied:
            progress.skipped += 1
            progress.skipped_samples += samples
        if self._saver is not None:
            if math.isfinite(numbers["loss"]):
                self._saver.observe(progress.step, None if self._own_loss else numbers["loss"], applied)
            self._saver.look()
        norm = numbers["grad_norm"]
        return StepResult(progress.step, numbers["loss"], norm if applied else math.nan, rate, applied)

    # -- results

    def save(self) -> str:
        """Save a checkpoint of the current step and return the run's directory. `mega.load`, `mega generate` and a
        resumed run can read the checkpoint. With `async_save` the checkpoint is complete at the next `save` or `close`
        at the latest.

        Errors: ValueError if the options have no `save`; FloatingPointError if the state is not finite; OSError.
        """
        self._check_open()
        if self._saver is None:
            raise ValueError("save is missing: give it, the directory for checkpoints")
        self._saver.save()
        directory = self._begun.state.run.checkpoint.save
        assert directory is not None
        return directory

    @overload
    def sample(
        self, prompt: str = "", tokens: int = 32, *, temperature: float = 0.8, top_k: int = 50, seed: int = 0
    ) -> str: ...
    @overload
    def sample(
        self, prompt: Sequence[int], tokens: int = 32, *, temperature: float = 0.8, top_k: int = 50, seed: int = 0
    ) -> list[int]: ...
    def sample(
        self,
        prompt: str | Sequence[int] = "",
        tokens: int = 32,
        *,
        temperature: float = 0.8,
        top_k: int = 50,
        seed: int = 0,
    ) -> str | list[int]:
        """Continue `prompt` with the current weights, by at most `tokens` tokens or up to the end of a document. Return
        the continuation without the prompt: a string if the prompt is a string, token ids if it is token ids. Each new
        token requires a forward pass over the whole sequence. top_k: 0 disables top-k sampling.

        Errors: ValueError if a sampling option is invalid, the model does not continue text, ids are outside the
        vocabulary, or the prompt and `tokens` exceed the model's positions.
        """
        self._check_open()
        state, tokenizer = self._begun.state, self._begun.inputs.tokenizer
        sampling_of(temperature=temperature, top_k=top_k, seed=seed)
        if family(state.run.model).prompt is None or state.mesh.cp.size > 1:
            raise ValueError("sample: needs a left-to-right model, and cp 1")
        model = architecture(state.run.model)
        longest = model.positions
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("sample: the run has no tokenizer; give token ids")
            # An empty prompt starts with the start token, if the tokenizer has one.
            ids = tokenizer.encode(prompt) or ([] if tokenizer.start is None else [tokenizer.start])
        else:
            ids = checked_ids("prompt", list(prompt), model.input.vocab).flatten().tolist()
        if not ids or type(tokens) is not int or tokens < 1 or len(ids) + tokens > longest + 1:
            raise ValueError(
                f"sample: {len(ids)} + {tokens} tokens: must be at least 1 + 1, at most {longest + 1} in all"
            )
        draws = torch.Generator().manual_seed(seed)
        end = None if tokenizer is None else tokenizer.eod
        new = continuation(state, ids, tokens, draws, end, temperature=temperature, top_k=top_k)
        return tokenizer.decode(new) if isinstance(prompt, str) and tokenizer is not None else new


def _check_loss(begun: StartedRun, level: str) -> None:
    """Check that the model's loss can be replaced. Errors: ValueError naming the setting that prevents a custom
    loss."""
    run, cp = begun.state.run, begun.state.mesh.cp.size
    if run.runtime.cuda_graph:
        raise ValueError("loss: excludes cuda_graph, since a recorded graph has one loss")
    if family(run.model).prompt is None or run.finetuning.task != "lm":
        raise ValueError("loss: needs a left-to-right model with task lm")
    if run.model.mtp_layers:
        raise ValueError(f"loss: excludes mtp_layers {run.model.mtp_layers}, whose losses are of tokens further on")
    if level == "sequence" and cp > 1:
        raise ValueError(f"level 'sequence': excludes cp {cp}, whose ranks hold parts of each sequence")
