"""Read the microbatches of one data-parallel rank. The position in the data is a single global sample index.

Every rank reads only its rows, directly from the memory-mapped files, so no data is sent between ranks. For a step that
begins at sample C, with d ranks and b rows per microbatch, rank r reads the samples C + (m d + r) b .. C + (m d + r) b
+ b - 1 in microbatch m. For d = 2 and b = 2:

             microbatch 0    microbatch 1
    rank 0   C      C + 1    C + 4  C + 5
    rank 1   C + 2  C + 3    C + 6  C + 7
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mega.core.batch import Batch, DecoderBatch
from mega.core.data import gpt
from mega.core.data.dataset import Dataset, samples_of


class Batches:
    """Reads a dataset in steps. `take(consumed, microbatches)` is a pure function of its two arguments.

    order: "single" reads the dataset's samples in sequence; "cyclic" assigns samples to ranks once and reshuffles each
    rank's samples every epoch, like Megatron-LM's cyclic sampler.
    sharding: with cyclic order, whether each rank reads a fixed share of the samples. If False, all samples are
    shuffled together and distributed round-robin, as with --no-data-sharding.
    eod: the id that ends a document; required by eod_mask_loss, reset_positions and reset_attention.
    collate: function (rows of token ids, index of the first row) -> batch, for batches other than `DecoderBatch`.
    Datasets whose samples are not plain token ids have a method `collate` instead.
    read_ahead: whether to prepare the next step in a background thread.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch: int,
        vocab: int,
        dp_index: int = 0,
        dp_size: int = 1,
        eod: int | None = None,
        order: Literal["single", "cyclic"] = "single",
        sharding: bool = True,
        eod_mask_loss: bool = False,
        reset_positions: bool = False,
        reset_attention: bool = False,
        read_ahead: bool = False,
        collate: Callable[[Sequence[object], int], Batch] | None = None,
    ) -> None:
        if eod is None and (eod_mask_loss or reset_positions or reset_attention):
            raise ValueError(
                "--eod-mask-loss, --reset-position-ids and --reset-attention-mask need a tokenizer with an "
                "end-of-document token"
            )
        assert 0 <= dp_index < dp_size and micro_batch > 0
        self._dataset, self._vocab, self._order, self._sharding = dataset, vocab, order, sharding
        self._rows, self._rank, self._ranks = micro_batch, dp_index, dp_size
        self._loss_eod = eod if eod_mask_loss else None
        self._position_eod = eod if reset_positions else None
        self._attention_eod = eod if reset_attention else None
        dataset_collate: Callable[[Sequence[object], int], Batch] | None = getattr(dataset, "collate", None)
        self._collate, self._of_tokens = dataset_collate or collate or self._left_to_right, dataset_collate is None
        self._threads = ThreadPoolExecutor(1, "read-ahead") if read_ahead else None
        self._ahead: dict[tuple[int, int], Future[list[Batch]]] = {}
        self._permutation: tuple[int, NDArray[np.int64]] | None = None

    def take(self, consumed: int, microbatches: int) -> list[Batch]:
        """Return this rank's microbatches for the step that begins at global sample `consumed`.

        Raises ValueError if the dataset ends before the end of the step, or contains an id outside the vocabulary.
        """
        ready = self._ahead.pop((consumed, microbatches), None)
        batches = ready.result() if ready else self._read(consumed, microbatches)
        if self._threads:
            after = consumed + microbatches * self._group
            self._ahead = {(after, microbatches): self._threads.submit(self._read, after, microbatches)}
        return batches

    def turn(self, consumed: int, size: int) -> int:
        """Return the index at which to read the next `size` samples (such as those of one validation pass) after
        `consumed` samples.

        The dataset contains as many samples as the run was planned to read. If a resumed run needs more, reading starts
        again at the first sample. In cyclic order, `take` wraps around instead.
        """
        if self._order == "cyclic":
            return consumed
        return consumed // size % max(len(self._dataset) // size, 1) * size

    @property
    def _group(self) -> int:
        """Number of samples in one microbatch, summed over all ranks."""
        return self._rows * self._ranks

    def _read(self, consumed: int, microbatches: int) -> list[Batch]:
        groups = [consumed + number * self._group for number in range(microbatches)]
        # Reading all samples of the step together is faster than reading each microbatch separately.
        samples = samples_of(self._dataset, [entry for begin in groups for entry in self._entries(begin)])
        return [
            self._batch(begin + self._rank * self._rows, samples[number * self._rows : (number + 1) * self._rows])
            for number, begin in enumerate(groups)
        ]

    def _entries(self, begin: int) -> Sequence[int]:
        """Return the dataset indices of this rank's rows in the group of samples that begins at `begin`."""
        if self._order == "cyclic":
            return self._cyclic_entries(begin)
        if begin + self._group > len(self._dataset):
            raise ValueError(
                f"the dataset has {len(self._dataset)} samples, but samples {begin} .. "
                f"{begin + self._group - 1} are to be read"
            )
        first = begin + self._rank * self._rows
        return range(first, first + self._rows)

    def _cyclic_entries(self, begin: int) -> Sequence[int]:
        groups = len(self._dataset) // self._group
        if not groups:
            raise ValueError(f"the dataset has {len(self._dataset)} samples, a microbatch takes {self._group}")
        epoch, within = divmod(begin, groups * self._group)
        if within % self._group:
            raise ValueError(
                f"--order cyclic: assigns {self._ranks} data ranks of --micro-batch {self._rows} whole rounds of "
                f"{self._group} samples, and the checkpoint lies at sample {begin}, within one; take the ranks and the "
                "micro batch that it was made with"
            )
        first = within // self._ranks
        if not self._sharding:
            return self._in_turn(epoch, first, groups * self._rows)
        share = groups * self._rows
        shuffled: list[int] = self._shuffled(epoch, share)[first : first + self._rows].tolist()
        return [self._rank * share + entry for entry in shuffled]

    def _in_turn(self, epoch: int, first: int, share: int) -> Sequence[int]:
        """Return the dataset indices of the microbatch that begins at offset `first` in this rank's share. All samples
        of an epoch are shuffled together.

        share: number of samples per rank and epoch. If the samples left over from an epoch fill a microbatch, the rank
        reads that microbatch at the start of the next epoch, as in Megatron-LM's sampler.
        """
        samples = len(self._dataset) // self._rows * self._rows
        if epoch and not first:
            left_over: list[int] = self._shuffled(epoch - 1, samples)[self._rank :: self._ranks][share:].tolist()
            if len(left_over) >= self._rows:
                return left_over[: self._rows]
        entries: list[int] = self._shuffled(epoch, samples)[self._rank :: self._ranks][
            first : first + self._rows
        ].tolist()
        return entries

    def _shuffled(self, epoch: int, count: int) -> NDArray[np.int64]:
        """Return the integers below `count`, shuffled for an epoch."""
        permutation = self._permutation  # local copy: the read-ahead thread may assign another epoch
        if permutation is None or permutation[0] != epoch:
            generator = torch.Generator()
            generator.manual_seed(epoch)
            permutation = self._permutation = epoch, torch.randperm(count, generator=generator).numpy()
        return permutation[1]

    def _batch(self, first: int, samples: Sequence[object]) -> Batch:
        """Return a batch of samples, the first of which is global sample `first`."""
        if self._of_tokens:
            rows = cast(Sequence[NDArray[np.int64]], samples)
            smallest, largest = min(int(row.min()) for row in rows), max(int(row.max()) for row in rows)
            if smallest < 0 or largest >= self._vocab:
                raise ValueError(
                    f"samples {first} .. {first + len(samples) - 1} hold token ids {smallest} .. "
                    f"{largest}, but the vocabulary's are 0 .. {self._vocab - 1}: made with another tokenizer"
                )
        return self._collate(samples, first)

    def _left_to_right(self, samples: Sequence[object], first: int) -> DecoderBatch:
        """Return a batch from rows of ids. The rows have one token more than the batch, because each token's label is
        the next token."""
        text = np.stack(cast(Sequence[NDArray[np.int64]], samples))
        tokens = np.ascontiguousarray(text[:, :-1])
        documents = None
        if self._attention_eod is not None:
            documents = torch.from_numpy(gpt.document_numbers(tokens, self._attention_eod))
        return DecoderBatch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(np.ascontiguousarray(text[:, 1:])),
            loss_weights=torch.from_numpy(gpt.loss_weights(tokens, self._loss_eod)),
            positions=torch.from_numpy(gpt.positions(tokens, self._position_eod)),
            samples=torch.arange(first, first + len(samples)),
            documents=documents,
        )
