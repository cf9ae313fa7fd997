"""The loop of every training run: a step, then whatever is due. Told once, for every family and layout.

for each step:   report = train_step(...)           device values, read while the next step runs
                 due: log, validate, save, stop     all ranks agree on each, so none waits alone
                                                    a wish to stop ends a validation between its batches
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mega.core.batch import Batch
from mega.core.config.resolve import global_batch_at, last_step, microbatches
from mega.core.data.batches import Batches
from mega.core.data.dataset import Dataset
from mega.core.device import Device, Moment, Reading
from mega.core.flops import model_flops_per_token
from mega.core.parallel.launch import connect, disconnect
from mega.core.parallel.mesh import Groups
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.audit import audit
from mega.core.training.inputs import Inputs, ResolvedRun, open_inputs
from mega.core.training.interrupt import Interrupt, Vote
from mega.core.training.meters import Meters
from mega.core.training.persist import (
    Origin,
    alone_in,
    claim,
    companions,
    differences,
    find_origin,
    restore,
    same_everywhere,
)
from mega.core.training.saver import Saver
from mega.core.training.schedules import Schedules, resumed_schedules
from mega.core.training.step import evaluate_step, train_step
from mega.core.training.wire import build_mesh, build_state


def pretrain(resolved: ResolvedRun) -> int:
    """Train as one rank of the world that the environment describes; the exit code.

    Errors: ValueError for what the user can mend; FloatingPointError where the loss is no number any more;
    RuntimeError for what else went wrong on the way.
    """
    runtime, prepared = resolved.run.runtime, open_inputs(resolved)
    world, device, groups = connect(runtime.device, runtime.backend, runtime.timeout_minutes)
    if runtime.deterministic:
        device.deterministic()
    with contextlib.ExitStack() as held:
        Training(prepared, world.rank, world.size, device, groups, held).play()
    disconnect()
    return 0


@dataclass(frozen=True)
class Pending:
    """A step whose numbers nobody has read yet."""

    step: int
    consumed: int
    lr: float
    samples: int
    begun: Moment
    numbers: Reading
    vote: Vote


class Training:
    """One rank's run, from its origin to its end."""

    def __init__(
        self,
        prepared: Inputs,
        rank: int,
        world: int,
        device: Device,
        groups: Groups,
        held: contextlib.ExitStack,
    ):
        """held: keeps what is this run's alone until it is closed."""
        run = self.run = prepared.run
        self.meters: Meters | None = None
        self.validated: int | None = None
        """The step behind which the validation sets were last read."""
        self.tokenizer: Tokenizer | None = prepared.tokenizer
        self.fingerprint = prepared.fingerprint()
        self.mesh = build_mesh(run, rank, world, groups)
        same_everywhere(self.mesh, self.fingerprint, device.torch)
        self.device = device
        # Before the newest checkpoint is looked for: whoever has the place may be saving one.
        claim(held, None if run.evaluation.skip_train else run.checkpoint.save, self.mesh, device.torch)
        self.state = build_state(run, self.mesh, device)
        origin = find_origin(run, self._say)
        if origin is not None:
            restore(self.state, origin)
        self.progress = self.state.progress
        self.steps = last_step(run, self.progress.step, self.progress.consumed)
        data = prepared.datasets
        if not run.evaluation.skip_train:
            alone_in(run, self.progress.step)
            self._enough(data.train)
        self.train, self.valid, self.test = (self._batches(split) for split in (data.train, data.valid, data.test))
        self.named = {name: self._batches(dataset) for name, dataset in data.named.items()}
        self.schedules = Schedules.of(run)
        if origin is not None and not origin.weights_only and run.checkpoint.load_optim:
            self.schedules = resumed_schedules(run, origin.checkpoint.meta, str(origin.checkpoint.path))
        self.interrupt = Interrupt(
            self.mesh.everyone, device.torch, on_signal=run.runtime.exit_on_signal, minutes=run.runtime.exit_minutes
        )
        if rank == 0:
            self.meters = self._meters()
        self.saver: Saver | None = None
        if run.checkpoint.save is not None:
            old = companions(origin.checkpoint, self.tokenizer) if origin is not None and rank == 0 else {}
            self.saver = Saver(
                self.state, self.tokenizer, self.fingerprint, self.schedules, self._say, old, data.corpora
            )
        self._introduce(prepared, origin)

    def _introduce(self, prepared: Inputs, origin: Origin | None) -> None:
        """What the user is to know before the first step."""
        for note in prepared.notes:
            self._say(note)
        if origin is None:
            return
        self._say(f"going on from {origin.checkpoint.path} at step {self.progress.step}")
        if not origin.weights_only:
            for told in differences(self.run, origin, prepared.datasets, self.mesh):
                self._say(told)
        if self.progress.step >= self.steps:
            self._say(f"nothing is left to train: the run ends with step {self.steps}")

    def play(self) -> None:
        """Train to the last step, then validate and test; whatever happens, the voice is closed."""
        try:
            if not self.run.evaluation.skip_train:
                self._train()
            if not self.interrupt.asked:
                if self.validated != self.progress.step:
                    self._validate()
                self._evaluate("test", self.test)
            self.state.grads.wait_param_gather()
        finally:
            self.state.pipeline.close()
            self.interrupt.close()
            if self.meters is not None:
                self.meters.close()

    def _train(self) -> None:
        """Every step and what is due behind it, to the last or a wish to stop; then a checkpoint of where we are."""
        pending: Pending | None = None
        saved = self.progress.step
        while self.progress.step < self.steps:
            current = self._step(pending)
            if pending is not None:
                self._read(pending)
            pending = current
            step, options = self.progress.step, self.run.checkpoint
            due_save = self.saver is not None and _every(options.save_interval, step)
            due_eval = (self.valid is not None or bool(self.named)) and _every(self.run.evaluation.eval_interval, step)
            if _every(self.run.runtime.audit_interval, step):
                audit(self.state)
            # With a loss scale the next learning rate depends on whether this step was skipped.
            if due_save or due_eval or self.interrupt.asked or step == self.steps or self.state.scaler:
                self._read(pending)
                pending = None
            if due_eval and step < self.steps:
                self._validate()
            if self.saver is not None:
                self.saver.look()
                if due_save:
                    self.saver.save()
                    saved = step
            if self.interrupt.asked or _every(self.run.runtime.exit_interval, step):
                break
        if pending is not None:
            self._read(pending)
        if self.saver is not None:
            if saved != self.progress.step:
                self.saver.save()
            self.saver.wait()
        if self.interrupt.asked:
            self._say(f"stopped at step {self.progress.step}: {self.interrupt.reason}")

    def _enough(self, dataset: Dataset | None) -> None:
        """See that the data last to the end, which another batch since the checkpoint changes. Errors: ValueError."""
        batch, progress = self.run.batch, self.progress
        if dataset is None or self.run.data.order == "cyclic" or batch.samples is not None:
            return
        assert batch.global_batch is not None
        end = progress.consumed + (self.steps - progress.step) * batch.global_batch
        if end > len(dataset) and progress.step < self.steps:
            raise ValueError(
                f"--global-batch {batch.global_batch}: the checkpoint has consumed {progress.consumed} samples in "
                f"{progress.step} steps, so --steps {self.steps} ends with sample {end}, but the data were laid out "
                f"for {len(dataset)}; give --samples {end} instead of --steps"
            )

    def _step(self, before: Pending | None) -> Pending:
        """Start one step; its numbers are read later. One that is asked for while the one before runs begins with that
        one's end."""
        progress = self.progress
        begun = Moment(self.device.torch) if before is None else before.numbers.moment
        size = global_batch_at(self.run.batch, progress.consumed)
        scheduled = progress.consumed - progress.unscheduled
        lr, decay = self.schedules.lr(scheduled), self.schedules.weight_decay(scheduled)
        assert self.train is not None
        batches = self.train.take(progress.consumed, microbatches(self.run, self.mesh.world, size))
        report = train_step(self.state, self._to_device(batches), lr, decay)
        progress.step += 1
        progress.consumed += size
        numbers, vote = report.start_reading(), self.interrupt.vote()
        return Pending(progress.step, progress.consumed, lr, size, begun, numbers, vote)

    def _read(self, pending: Pending) -> None:
        """Wait for a step's numbers; tell them; learn whether any rank was asked to stop."""
        numbers = pending.numbers.numbers()
        loss, norm = numbers["loss"], numbers["grad_norm"]
        if not numbers.pop("finite"):
            self.progress.skipped += 1
            # Without a loss scale the next step has been asked for by now: a step that the schedule did not count would
            # be left out one step earlier wherever this one is read at once, as before a save.
            if self.state.scaler is not None:
                self.progress.unscheduled += pending.samples
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"step {pending.step}: the loss is {loss}, and the gradient norm {norm}: training has diverged. Go on "
                "from an earlier checkpoint with a lower --lr, a longer warm-up or --clip-grad"
            )
        pending.vote.count()
        if self.meters is not None:
            length = self.run.batch.seq_length
            assert length is not None
            row = {
                "consumed": pending.consumed,
                "lr": pending.lr,
                "batch": pending.samples,
                "skipped": self.progress.skipped,
                **numbers,
                "seconds": pending.begun.seconds_to(pending.numbers.moment),
            }
            memory = self.device.memory_peak() or self.device.resident()
            self.meters.step(pending.step, row, pending.samples * length, memory)

    def _validate(self) -> None:
        """The validation set from where it was left, and the named ones, each from its first sample."""
        self.validated = self.progress.step
        self._evaluate("valid", self.valid)
        for name, batches in self.named.items():
            self._evaluate(name, batches)

    def _evaluate(self, split: str, batches: Batches | None) -> None:
        """Mean loss over `eval_iters` global batches of a split; none where a wish to stop cuts it short.

        Either way the next validation begins where it would have, so no figure depends on interruptions.
        """
        iterations, batch = self.run.evaluation.eval_iters, self.run.batch.global_batch
        if batches is None or not iterations:
            return
        assert batch is not None
        sums = torch.zeros(len(self.state.pipeline.names), 2, dtype=torch.float64, device=self.device.torch)
        begin = 0
        if split == "valid":
            begin = batches.turn(self.progress.consumed_valid, iterations * batch)
            self.progress.consumed_valid += iterations * batch
        count = microbatches(self.run, self.mesh.world)
        for done in range(iterations):
            if self.interrupt.asked:
                told = f"{split} at step {self.progress.step} | cut short after {done} of {iterations} batches"
                self._say(f"{told}: {self.interrupt.reason}")
                return
            vote = self.interrupt.vote()
            sums += evaluate_step(self.state, self._to_device(batches.take(begin + done * batch, count)))
            vote.count()  # it travelled while this batch was asked for
        terms = len(self.state.stages[0].terms)
        loss = float((sums[:terms, 0] / sums[:terms, 1]).sum())
        if math.isnan(loss) and not sums[:terms, 1].all():
            self._say(f"{split} at step {self.progress.step} | no token of its {iterations} batches is trained on")
        if self.meters is not None:
            self.meters.evaluation(self.progress.step, split, loss)

    def _to_device(self, batches: Sequence[Batch]) -> list[Batch]:
        return [batch.to(self.device.torch) for batch in batches]

    def _batches(self, dataset: Dataset | None) -> Batches | None:
        if dataset is None:
            return None
        run, data = self.run, self.run.data
        assert run.batch.micro_batch is not None and run.model.vocab is not None
        return Batches(
            dataset,
            micro_batch=run.batch.micro_batch,
            vocab=run.model.vocab,
            dp_index=self.mesh.dp.index,
            dp_size=self.mesh.dp.size,
            eod=self.tokenizer.eod if self.tokenizer is not None else None,
            order=data.order,
            eod_mask_loss=data.eod_mask_loss,
            reset_positions=data.reset_positions,
            reset_attention=data.reset_attention,
            read_ahead=data.data_workers > 0,
        )

    def _meters(self) -> Meters:
        run = self.run
        assert run.batch.seq_length is not None
        return Meters(
            run.log,
            start=self.progress.step,
            steps=self.steps,
            flops_per_token=model_flops_per_token(run.model, run.batch.seq_length),
            devices=self.mesh.world,
            peak=self.device.peak_tflops,
        )

    def _say(self, line: str) -> None:
        if self.mesh.rank != 0:
            return
        if self.meters is not None:
            self.meters.say(line)
        else:
            print(line, flush=True)


def _every(interval: int | None, step: int) -> bool:
    return bool(interval) and step % (interval or 1) == 0
