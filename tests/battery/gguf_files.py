"""GGUF files of ours against llama.cpp, and llama.cpp's against ours: logits, token ids, greedy text.

    python tests/battery/gguf_files.py [--out build/battery/gguf_files.jsonl]

Needs gguf, transformers and llama-cpp-python. Small random models of every family that is written, with tokenizers of
each kind, in every type: the file is opened by llama.cpp, whose logits of random tokens, whose ids of odd texts and
whose greedy continuation are compared with those of the checkpoint that it was made from; and what mega reads of that
file, and of one that llama.cpp quantised (Q4_K, Q6_K), with llama.cpp's. One JSON line a case.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mega.core.checkpoint.forms.convert import convert
from mega.core.checkpoint.forms.open import open_weights
from mega.core.checkpoint.own.model import model_of
from mega.core.inference.loading.load import load_tokenizer, special_tokens
from mega.core.proof.logits import OwnSource, _logits
from tests.support.gguf_models import CASES, TEXTS, folder_of

TYPES = ("f32", "f16", "bf16", "q8_0")
QUANTISED = {"Q4_K": 15, "Q6_K": 18}
"""llama.cpp's number of a mixture of types whose matrices are of this one."""


def own_logits(place: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    weights = open_weights(str(place))
    found = _logits(model_of(weights.meta, str(place)), OwnSource(weights), torch.tensor([ids]))
    result: np.ndarray[Any, Any] = found[0].detach().numpy()
    return result


def judged(file: Path) -> Any:
    import llama_cpp

    # Without a fused attention, whose keys and values would be fp16.
    return llama_cpp.Llama(
        str(file),
        n_ctx=64,
        logits_all=True,
        verbose=False,
        n_threads=1,
        type_k=0,
        type_v=0,
        flash_attn=False,
    )


def theirs(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    model.reset()
    model.eval(ids)
    found: np.ndarray[Any, Any] = np.array(model.scores[: len(ids)], np.float32)
    return found


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    every = list(ids)
    for _ in range(count):
        every.append(int(theirs(model, every)[-1].argmax()))
    return every[len(ids) :]


def row(case: str, outtype: str, own: Path, file: Path) -> dict[str, Any]:
    model = judged(file)
    weights = open_weights(str(own))
    tokenizer = load_tokenizer(weights)
    vocab = model_of(weights.meta, str(own)).vocab
    ids = np.random.RandomState(0).randint(3, vocab, 24).tolist()
    ours, other, read = own_logits(own, ids), theirs(model, ids), own_logits(file, ids)
    texts = 0
    for text in TEXTS:
        mine = tokenizer.encode(text)
        mine = mine[1:] if mine[:1] == [tokenizer.bos] else mine
        texts += mine == model.tokenize(text.encode(), add_bos=False, special=False)
    every = list(ids)
    for _ in range(16):
        every.append(int(own_logits(file, every)[-1].argmax()))
    template = model.metadata.get("tokenizer.chat_template")
    again = load_tokenizer(open_weights(str(file)))
    return {
        "case": case,
        "type": outtype,
        "checkpoint against llama.cpp": float(np.abs(ours - other).max()),
        "largest logit": float(np.abs(ours).max()),
        "our reading against llama.cpp": float(np.abs(read - other).max()),
        "same texts": f"{texts} of {len(TEXTS)}",
        "same texts after reading": sum(again.encode(t) == tokenizer.encode(t) for t in TEXTS),
        "greedy": every[len(ids) :] == greedy(model, ids, 16),
        "template": template is not None,
    }


def quantised(file: Path, number: int, kind: str) -> Path:
    """A file that llama.cpp made of ours."""
    import llama_cpp

    to = file.with_name(f"{kind}.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure = number, 1, True
    status = llama_cpp.llama_model_quantize(str(file).encode(), str(to).encode(), ctypes.byref(params))
    assert status == 0, kind
    return to


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("build/battery/gguf_files.jsonl"))
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, out.open("w") as file:
        for case in CASES:
            own = Path(temporary) / f"{case}-own"
            convert(folder_of(Path(temporary) / case, case, hidden=256), own, "mega")
            rows = []
            for outtype in TYPES:
                to = Path(temporary) / f"{case}-{outtype}"
                convert(own, to, "gguf", outtype=outtype, tokens=special_tokens)
                rows.append(row(case, outtype, own, to / "model.gguf"))
            whole = Path(temporary) / f"{case}-f32" / "model.gguf"
            rows += [row(case, kind, own, quantised(whole, number, kind)) for kind, number in QUANTISED.items()]
            for each in rows:
                print(json.dumps(each), flush=True)
                file.write(json.dumps(each) + "\n")


if __name__ == "__main__":
    main()
