"""Small tokenizers as models of others bring them, trained on a fixed text: no network, no files.

"spm-…" are of the SentencePiece kind (a space is part of the word after it, bytes stand in for
unknown characters), "bytes-…" of the byte-level kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXT = "".join(
    f"def squared_{n}(value):\n    '''The square of {n} is {n * n}, and that of ünï is not.'''\n"
    f"    return  value ** 2  # {'=' * (n % 9)} the other one\n\n\n"
    for n in range(300)
)

NASTY = (
    "",
    "a",
    " leading and trailing  ",
    "two  spaces,   three\n\n\n\tand tabs\t\t \n   indented",
    "ünïcödé 😀 한국어 \u0301e\u0301 \u200b\ufeff\r\n",
    "def f(a): on",
    "12345678901234567890 3.14159 1,000,000",
    "The <s>text</s> holds <|im_start|>marks<|im_end|> and <|eot_id|> of its own",
    "=" * 999,
    "\n" * 50 + " " * 77 + "x",
    "don't WE'LL can't I'm",
    "\x01\x7f\x80 \ue000",
)

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the square of 3?"},
    {"role": "assistant", "content": "It is 9,  of course.\n"},
    {"role": "user", "content": " And of ünï? "},
    {"role": "assistant", "content": "That one is not."},
]

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MARKS_3 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>"),
)


def _sentencepiece(*, legacy: bool) -> Any:
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training alone
    special = ["<unk>", "<s>", "</s>"]
    as_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    inner.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=600, special_tokens=special + as_bytes, show_progress=False),
    )
    if legacy:  # Llama 2, Mistral 7B
        prefix = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        inner.normalizer, inner.pre_tokenizer = normalizers.Sequence(prefix), None
    else:  # later ones
        inner.normalizer = None
        inner.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return _only_special(inner, special)


def _byte_level(marks: tuple[str, ...], *, begins: bool, trims: bool) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    inner = Tokenizer(models.BPE())
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    pattern += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=list(marks),
            initial_alphabet=letters,
            show_progress=False,
        ),
    )
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trims)]
    if begins:
        steps.append(
            processors.TemplateProcessing(
                single=f"{marks[0]} $A",
                pair=f"{marks[0]} $A {marks[0]} $B",
                special_tokens=[(marks[0], inner.token_to_id(marks[0]))],
            )
        )
    inner.post_processor = processors.Sequence(steps)
    return inner


def _only_special(inner: Any, special: list[str]) -> Any:
    """Bytes are tokens like others, though they were given to the trainer as special ones."""
    from tokenizers import Tokenizer

    table = json.loads(inner.to_str())
    table["added_tokens"] = [one for one in table["added_tokens"] if one["content"] in special]
    return Tokenizer.from_str(json.dumps(table))


_SPM = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_THREE = {"bos_token": MARKS_3[0], "eos_token": "<|eot_id|>"}

MADE: dict[str, tuple[Callable[[], Any], dict[str, Any], list[str]]] = {
    "spm-legacy": (lambda: _sentencepiece(legacy=True), _SPM, ["</s>"]),
    "spm-chat": (
        lambda: _sentencepiece(legacy=False),
        {**_SPM, "chat_template": LLAMA_2},
        ["</s>"],
    ),
    "bytes-chatml": (
        lambda: _byte_level(
            ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), begins=False, trims=False
        ),
        {**_QWEN, "chat_template": CHATML},
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "bytes-llama3": (
        lambda: _byte_level(MARKS_3, begins=True, trims=True),
        {**_THREE, "chat_template": LLAMA_3},
        ["<|end_of_text|>", "<|eot_id|>"],
    ),
}
"""How each is made, its tokenizer_config.json, and the tokens that end what is generated."""


def write(folder: Path, kind: str) -> dict[str, Any]:
    """The files of a tokenizer; what config.json says of its ids."""
    make, about, ends = MADE[kind]
    inner = make()
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **about}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    ids = [inner.token_to_id(one) for one in ends]
    given = {"eos_token_id": ids if len(ids) > 1 else ids[0]}
    if "bos_token" in about:
        given["bos_token_id"] = inner.token_to_id(about["bos_token"])
    (folder / "generation_config.json").write_text(json.dumps(given))
    return {**given, "vocab_size": inner.get_vocab_size()}
