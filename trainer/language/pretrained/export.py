"""Write a model's folder as Hugging Face lays it out, in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import MATRICES
from trainer.data.tokenizer import EXTRA, SubwordTokenizer
from trainer.language.architecture import STACKED, Architecture
from trainer.language.pretrained.huggingface import NAMES, ONE_FILE
from trainer.language.pretrained.tokenizer_files import ABOUT, TOKENIZER, special_tokens
from trainer.settings import SettingsError


def export(
    folder: Path,
    architecture: Architecture,
    params: Mapping[str, Any],
    tokenizer: SubwordTokenizer,
) -> None:
    """config.json, model.safetensors (float32), the tokenizer and what came with it.

    Our own loader and Hugging Face's read it. Raises `SettingsError` where the folder holds
    something else already.
    """
    try:
        from safetensors.numpy import save_file
    except ModuleNotFoundError:
        raise SettingsError(f"--out: the package safetensors is not installed: {EXTRA}") from None
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"--out {folder}: is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise SettingsError(f"--out {folder}: is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    about = _about(tokenizer)
    config = config_of(architecture, ends=tokenizer.ends) | _ids(tokenizer, about)
    _write_json(folder / "config.json", config)
    (folder / TOKENIZER).write_text(tokenizer.text, encoding="utf-8")
    for name, text in tokenizer.beside.items():
        (folder / name).write_text(text, encoding="utf-8")
    _write_json(folder / ABOUT, about)
    # Hugging Face looks for the framework in the metadata.
    save_file(tensors_of(architecture, params), folder / ONE_FILE, metadata={"format": "pt"})
    (folder / ONE_FILE).chmod((folder / "config.json").stat().st_mode)  # the library gives 0600


def _about(tokenizer: SubwordTokenizer) -> dict[str, Any]:
    """tokenizer_config.json: what the model came with, but that tokenizer.json alone counts.

    Classes of single models would build another tokenizer than the one that was trained with.
    """
    about: dict[str, Any] = json.loads(tokenizer.beside.get(ABOUT, "{}"))
    about.pop("auto_map", None)  # code that is not exported
    about["tokenizer_class"] = "PreTrainedTokenizerFast"
    if tokenizer.end is not None:
        about.setdefault("eos_token", tokenizer.piece(tokenizer.end))
    return about


def _ids(tokenizer: SubwordTokenizer, about: Mapping[str, Any]) -> dict[str, int]:
    """The ids of the special tokens, as config.json names them."""
    found = {
        f"{name}_token_id": tokenizer.token(special_tokens(about).get(f"{name}_token", ""))
        for name in ("bos", "pad")
    }
    return {name: token for name, token in found.items() if token is not None}


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def config_of(architecture: Architecture, *, ends: Sequence[int]) -> dict[str, Any]:
    """What config.json says of a model."""
    kind = "llama"
    if architecture.attention_bias:
        kind = "qwen2"
    if architecture.query_key_norm:
        kind = "qwen3"
    scaling = architecture.rope_scaling
    table: dict[str, Any] | None = None
    if scaling is not None:
        table = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            table |= {
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original,
            }
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": architecture.vocabulary,
        "hidden_size": architecture.width,
        "num_hidden_layers": architecture.layers,
        "num_attention_heads": architecture.heads,
        "num_key_value_heads": architecture.key_value_heads,
        "head_dim": architecture.head_size,
        "intermediate_size": architecture.hidden,
        "hidden_act": "silu",
        "rms_norm_eps": architecture.norm_epsilon,
        "rope_theta": architecture.rope_base,
        "rope_scaling": table,
        "tie_word_embeddings": architecture.tied,
        "max_position_embeddings": architecture.context or 2048,
        "attention_bias": kind == "qwen2",
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        "bos_token_id": None,
        "torch_dtype": "float32",
    }


def tensors_of(architecture: Architecture, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters under the names, and in the orientation, of Hugging Face."""
    found: dict[str, Any] = {}
    for name in architecture.shapes:
        values = np.asarray(params[name], np.float32)
        blocks = list(values) if name in STACKED else [values]
        for number, block in enumerate(blocks):
            turned = block.T if name in MATRICES or name == "head" else block
            found[NAMES[name].format(number)] = np.ascontiguousarray(turned)
    return found
