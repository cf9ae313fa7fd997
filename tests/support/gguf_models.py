"""Small random models of the families that GGUF has, with tokenizers of each kind and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from mega.core.checkpoint.forms.gguf.vocabulary import CUTS
from tests.support.hugging_face import hf_folder

TEXTS = (
    "Hello world, it's 12345 o'clock! We'LL see...",
    "  two blanks\n\n\nlines\t\ttabs   end  ",
    "Übergröße naïve 東京 привет мир ٣٤٥ 🙂👍🏽",
    "<|im_start|>user no control tokens",
    "def f(x):\n    return {'a': x[0] ** 2}  # 3.14",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CASES = {
    "llama2-sentencepiece": ("llama2", "sentencepiece"),
    "llama3-llama-bpe": ("llama3", "llama-bpe"),
    "llama3.2-llama-bpe": ("llama3.2", "llama-bpe"),
    "mistral-gpt-2": ("mistral", "gpt-2"),
    "tied-smollm": ("tied", "smollm"),
    "qwen2-qwen2": ("qwen2", "qwen2"),
    "qwen3-qwen2": ("qwen3", "qwen2"),
}
"""Case -> the family of tests/support/hugging_face.py, and the rule that cuts texts."""


def byte_level(folder: Path, cut: str) -> int:
    """A tokenizer.json of byte-level BPE with two control tokens, trained on the texts; its size."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    rule = CUTS[cut]
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule.whole))
    if rule.normalizer is not None:
        tokenizer.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if rule.digits else []
    from tokenizers import Regex

    split = pre_tokenizers.Split(Regex(rule.pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, split, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return int(tokenizer.get_vocab_size())


def sentencepiece(folder: Path) -> int:
    import sentencepiece as library

    text = folder / "text"
    text.write_text("\n".join(each.replace("\n", " ") for each in TEXTS * 20))
    library.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    text.unlink()
    (folder / "tokenizer.vocab").unlink()
    return 380


def folder_of(folder: Path, case: str, hidden: int = 64) -> Path:
    """A Hugging Face folder with a tokenizer and a template."""
    family, cut = CASES[case]
    folder.mkdir(parents=True, exist_ok=True)
    size = sentencepiece(folder) if cut == "sentencepiece" else byte_level(folder, cut)
    made = folder / "tokenizer.model"
    kept = made.read_bytes() if made.exists() else None
    hf_folder(folder, family, std=0.15, hidden_size=hidden, intermediate_size=hidden, vocab_size=size + 4)
    made.unlink()
    if kept is not None:
        made.write_bytes(kept)
    end = "</s>" if kept is not None else "<|im_end|>"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "chat_template": TEMPLATE}
    if kept is None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    config |= {"eos_token_id": 2, "bos_token_id": 1 if kept is not None else None, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
