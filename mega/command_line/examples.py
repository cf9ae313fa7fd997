"""Worked examples of every subcommand for `--help`: what a command line does, and the command line. Each line fits in
80 columns."""

from __future__ import annotations

from collections.abc import Mapping

Examples = tuple[tuple[str, str], ...]

EXAMPLES: Mapping[str, Examples] = {
    "quickstart": (
        ("the whole tour, in a new folder", "mega quickstart"),
        ("shorter, and in a folder of your choice", "mega quickstart --out demo --steps 50"),
    ),
    "train-tokenizer": (
        ("GPT-2's kind", "mega train-tokenizer --input texts --output-dir tok --vocab-size 32000"),
        (
            "BERT's kind",
            "mega train-tokenizer --kind wordpiece --input a --output-dir t --vocab-size 99",
        ),
    ),
    "preprocess": (
        (
            "with a tokenizer.json",
            "mega preprocess --input a.jsonl --output-prefix a \\\n"
            "      --tokenizer HuggingFaceTokenizer --tokenizer-model tok",
        ),
        (
            "plain text with a document in each line, on four processes",
            "mega preprocess --input a.txt --output-prefix a --text-lines --workers 4 \\\n"
            "      --tokenizer Llama2Tokenizer --tokenizer-model tokenizer.model",
        ),
    ),
    "pretrain": (
        (
            "one process, saved at the end",
            "mega pretrain --model gpt2-124m --data-path a_text_document --save run",
        ),
        (
            "random tokens on 4 ranks, to try a layout",
            "mega pretrain --model tiny-llama --mock-data --steps 20 --nproc 4 --tp 2",
        ),
    ),
    "finetune": (
        (
            "on conversations, with adapters",
            "mega finetune --load hf --chat-data a.jsonl --lora-rank 16 --save run",
        ),
        ("from pairs of answers", "mega finetune --task dpo --dpo-data pairs.jsonl --load run --save better"),
    ),
    "launch": (
        (
            "a Slurm script",
            "mega launch slurm --hosts 4 --nproc 8 -- pretrain --config run.toml > run.sh",
        ),
        (
            "a Kubernetes manifest",
            "mega launch jobset --hosts 2 --nproc 8 -- pretrain --config a.toml > a.yaml",
        ),
    ),
    "lr-find": (
        ("for a planned run", "mega lr-find --config run.toml"),
        ("over a smaller range of rates", "mega lr-find --config run.toml --min-lr 1e-5 --lr 1e-1 --steps 50"),
    ),
    "eval": (
        ("LAMBADA", "mega eval --load run --task lambada --valid-data lambada.jsonl"),
        ("tasks of lm-eval", "mega eval --load run --tasks hellaswag,arc_easy --limit 100"),
    ),
    "serve": (
        ("a run, for clients on this machine", "mega serve run --port 8000"),
        (
            "on two ranks, for other machines too",
            "mega serve Llama-2-7b-hf --tp 2 --host 0.0.0.0 --token-file token",
        ),
    ),
    "download": (
        ("a model", "mega download HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("a data set's rows, into a folder", "mega download tatsu-lab/alpaca --kind dataset --to alpaca"),
    ),
    "push": (
        ("a run's newest step", "mega push run me/my-model --license apache-2.0"),
        ("a folder, into a private repository", "mega push hf me/my-model --private"),
    ),
    "chat": (
        ("with a finetuned model", 'mega chat run --system "Be brief." --temperature 0.7'),
        ("with a server", "mega chat --url localhost:5000"),
    ),
    "generate": (
        ("one text", 'mega generate --load run --prompt "Once upon a time" --tokens 64'),
        ("a file of prompts", "mega generate --load run --input a.txt --output b.jsonl --greedy"),
    ),
    "reshard": (
        ("for other ranks", "mega reshard --load-dir run --save-dir cut --tp 2 --pp 2"),
        ("to Megatron-LM", "mega reshard --load-dir run --save-dir out --saver megatron --tp 2"),
    ),
    "convert-llama": (
        ("to a mega checkpoint", "mega convert-llama --load-dir Llama-2-7b-hf --save-dir weights"),
        ("for llama.cpp, in 8 bits", "mega convert-llama --load-dir run --save-dir g --to gguf --outtype q8_0"),
    ),
    "presets": (
        ("all of them", "mega presets"),
        ("presets whose names begin with llama or gpt2, as JSON", "mega presets llama gpt2 --json"),
    ),
    "memory-estimate": (
        ("one layout", "mega memory-estimate --model llama2-7b --micro-batch 1 --tp 2 --world 8"),
        (
            "search for the fastest",
            "mega memory-estimate --model llama2-7b --global-batch 256 --gpus 8 --gpu h100",
        ),
    ),
    "preflight": (
        ("the ranks of this host", "mega preflight --nproc 8"),
        ("on several hosts, with the disk", "torchrun --nproc-per-node 8 -m mega preflight --save runs"),
    ),
    "parity": (
        ("the usual layouts", "mega parity"),
        ("one family, in some layouts", "mega parity --family llama --layouts tp2,pp2"),
    ),
    "bench": (
        ("a named row", "mega bench w1"),
        ("a server under load", "mega bench serve --load run --requests 64"),
    ),
    "plot": (
        ("in the terminal", "mega plot runs/a runs/b --metric loss"),
        ("as a picture", "mega plot runs/a --metric grad_norm --log --out norm.svg"),
    ),
    "report": (
        ("of a run", "mega report runs/a"),
        ("of an evaluation", "mega report eval-lambada.json --out lambada.html"),
    ),
    "translate": (
        ("a script", "mega translate pretrain_gpt.sh"),
        ("a line", "mega translate torchrun pretrain_bert.py --num-layers 24"),
    ),
    "doctor": (("the summary", "mega doctor"), ("everything, as JSON", "mega doctor --json")),
    "completions": (
        ("for bash", "mega completions ~/.mega && echo 'source ~/.mega/mega.bash' >> ~/.bashrc"),
        ("for zsh", "mega completions ~/.mega && echo 'source ~/.mega/mega.zsh' >> ~/.zshrc"),
    ),
    "data merge": (
        ("two pairs", "mega data merge a_text_document b_text_document --output-prefix both"),
        ("all of a folder", "mega data merge folder --output-prefix all"),
    ),
    "data verify": (
        ("one pair", "mega data verify a_text_document"),
        ("several", "mega data verify a_text_document b_text_document"),
    ),
    "data note": (
        ("checksums", "mega data note a_text_document"),
        (
            "and the tokenizer",
            "mega data note a_text_document \\\n"
            "      --tokenizer HuggingFaceTokenizer --tokenizer-model tokenizer.json",
        ),
    ),
    "data inspect": (
        ("sizes and texts", "mega data inspect a_text_document"),
        ("as JSON", "mega data inspect a_text_document --json"),
    ),
    "data from-numpy": (
        ("an array of arrays", "mega data from-numpy --input ids.npy --output-prefix ids"),
        ("one long array of ids", "mega data from-numpy --input ids.npy --output-prefix ids --eod 0"),
    ),
    "data split": (
        ("98, 1 and 1 per cent", "mega data split --input a.jsonl --output-dir parts"),
        ("without a test set", "mega data split --input a.jsonl --output-dir parts --split 90,10,0"),
    ),
    "data presplit": (
        ("English", "mega data presplit --input a.jsonl --output b.jsonl"),
        ("German", "mega data presplit --input a.jsonl --output b.jsonl --lang german"),
    ),
    "data detokenize": (
        ("a file", "mega data detokenize --input wiki.test.tokens --output wiki.txt"),
        ("Penn Treebank's, to stdout", "mega data detokenize --input ptb.txt --detokenizer ptb"),
    ),
    "data encode": (
        (
            "GPT-2's",
            "mega data encode --input a.txt --output a.ids --vocab-file v --merge-file m",
        ),
        (
            "a tokenizer.json's",
            "mega data encode --input a.txt --output a.ids \\\n"
            "      --tokenizer HuggingFaceTokenizer --tokenizer-model tok",
        ),
    ),
    "data show-sample": (
        (
            "of token files",
            "mega data show-sample --data-path a_text_document \\\n"
            "      --tokenizer HuggingFaceTokenizer --tokenizer-model tok",
        ),
        (
            "a conversation",
            "mega data show-sample --input chat.jsonl \\\n      --tokenizer HuggingFaceTokenizer --tokenizer-model tok",
        ),
    ),
    "checkpoint verify": (
        ("all checkpoints of a run", "mega checkpoint verify runs/a"),
        ("one step", "mega checkpoint verify runs/a/step-0001000"),
    ),
    "checkpoint show": (
        ("a summary", "mega checkpoint show runs/a"),
        ("every tensor, as JSON", "mega checkpoint show runs/a --tensors --json"),
    ),
    "checkpoint diff": (
        ("of two runs", "mega checkpoint diff runs/a runs/b"),
        ("weights only", "mega checkpoint diff runs/a/step-0001000 runs/b --weights"),
    ),
    "checkpoint clean": (
        ("print what would be removed", "mega checkpoint clean runs/a --keep-last 3 --dry-run"),
        ("keep 3, and every 1000th", "mega checkpoint clean runs/a --keep-last 3 --keep-every 1000"),
    ),
    "retro build": (
        ("the whole database", "mega retro build --directory db --embedder bert --data-path a_text_document"),
        ("a half, on one of two hosts", "mega retro build --config db.toml --shard 1/2"),
    ),
    "retro query": (
        ("for a planned run", "mega retro query --config run.toml --embedder bert"),
        ("a half, on one of two hosts", "mega retro query --config run.toml --embedder bert --shard 1/2"),
    ),
    "retro inspect": (
        ("a chunk", "mega retro inspect --config run.toml --chunk 7"),
        ("a sample and its neighbours", "mega retro inspect --config run.toml --sample 0"),
    ),
    "corpus urls": (
        ("a list", "mega corpus urls --input urls.txt --output kept.txt"),
        (
            "JSON lines, with your own list of domains",
            "mega corpus urls --input a.jsonl --output b --domains blocked.txt",
        ),
    ),
    "corpus clean": (
        ("OpenWebText's clean-up", "mega corpus clean --input raw --output clean --workers 4"),
        ("German, short texts too", "mega corpus clean --input raw --output de --language de --min-tokens 32"),
    ),
    "corpus near-duplicates": (
        ("in a folder", "mega corpus near-duplicates --input clean --output unique"),
        (
            "after an earlier corpus",
            "mega corpus near-duplicates --input new --output unique --against old",
        ),
    ),
    "corpus decontaminate": (
        (
            "remove the questions of a benchmark",
            "mega corpus decontaminate --input a --output b --task-data lambada=test.jsonl",
        ),
        (
            "questions in a folder, on four processes",
            "mega corpus decontaminate --input a --output b --task-data race=d --workers 4",
        ),
    ),
    "corpus wikipedia": (
        (
            "a dump",
            "mega corpus wikipedia --input enwiki-pages-articles.xml.bz2 --output wiki",
        ),
        ("one sentence in each line, for BERT", "mega corpus wikipedia --input dump.xml --output w --split-sentences"),
    ),
    "corpus merge": (
        ("into one file", "mega corpus merge --input parts --output all.jsonl"),
        ("into a folder of .zst", "mega corpus merge --input parts --output all --compress zst"),
    ),
    "corpus annotate": (
        ("with a list of words", "mega corpus annotate --input a --output b --scorer words:bad.txt"),
        ("with a file of scores", "mega corpus annotate --input a --output b --scorer scores:s.jsonl"),
    ),
    "corpus select": (
        ("the least toxic half", "mega corpus select --input scored --output kept"),
        ("the lowest tenth by another key", "mega corpus select --input a --output b --by perplexity --share 0.1"),
    ),
    "corpus group": (
        ("by pairs", "mega corpus group --pairs pairs.jsonl --groups groups.jsonl"),
        ("only very similar documents", "mega corpus group --pairs p.jsonl --groups g.jsonl --threshold 0.9"),
    ),
    "corpus remove-groups": (
        ("all but the first", "mega corpus remove-groups --input a --output b --groups groups.jsonl"),
        ("by another key", "mega corpus remove-groups --input a --output b --groups g --id-key id"),
    ),
    "corpus shuffle": (
        ("a folder", "mega corpus shuffle --input a --output b"),
        ("another order", "mega corpus shuffle --input a --output b --seed 7"),
    ),
    "corpus filter": (
        ("with all rules", "mega corpus filter --input a --output b --dropped why"),
        ("with Gopher's rules", "mega corpus filter --input a --output b --preset gopher-quality"),
    ),
    "corpus exact-duplicates": (
        ("documents", "mega corpus exact-duplicates --input a --output b"),
        ("paragraphs", "mega corpus exact-duplicates --input a --output b --paragraphs"),
    ),
    "corpus mask-pii": (
        ("e-mail and IP addresses", "mega corpus mask-pii --input a --output b"),
        ("bank cards too", "mega corpus mask-pii --input a --output b --kinds email ip card"),
    ),
    "corpus run": (
        ("all steps", "mega corpus run recipe.toml"),
        ("print its command lines only", "mega corpus run recipe.toml --dry-run"),
    ),
}
"""Words of a command, such as `pretrain` or `data merge` -> examples of the command."""
