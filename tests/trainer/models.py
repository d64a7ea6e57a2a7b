"""Small pretrained models, written as others write theirs: safetensors folders and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]

VOCABULARY = 270
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "eos_token_id": 257,
}
SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILY: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "llama-scaled": {**LLAMA, "rope_theta": 500000.0, "rope_scaling": SCALED},
    "llama-linear": {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mistral": {**LLAMA, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "qwen2": {**LLAMA, "model_type": "qwen2", "use_sliding_window": False, "num_hidden_layers": 6},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16, "attention_bias": False},
}


def tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Random weights under the names of Hugging Face, float32."""
    draw = np.random.default_rng(seed)
    width, hidden = config["hidden_size"], config["intermediate_size"]
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", width // heads)

    def matrix(*shape: int) -> NDArray[Any]:
        drawn: NDArray[Any] = draw.normal(size=shape) * shape[-1] ** -0.5
        return drawn.astype(np.float32)

    def scale(length: int) -> NDArray[Any]:
        return (1 + 0.2 * draw.normal(size=length)).astype(np.float32)

    found: Tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention = f"{prefix}self_attn."
        found[f"{prefix}input_layernorm.weight"] = scale(width)
        found[f"{prefix}post_attention_layernorm.weight"] = scale(width)
        for which, out in (("q", heads * size), ("k", shared * size), ("v", shared * size)):
            found[f"{attention}{which}_proj.weight"] = 2 * matrix(out, width)
            if config["model_type"] == "qwen2":
                found[f"{attention}{which}_proj.bias"] = matrix(out)
        found[f"{attention}o_proj.weight"] = matrix(width, heads * size)
        if config["model_type"] == "qwen3":
            found[f"{attention}q_norm.weight"] = scale(size)
            found[f"{attention}k_norm.weight"] = scale(size)
        found[f"{prefix}mlp.gate_proj.weight"] = matrix(hidden, width)
        found[f"{prefix}mlp.up_proj.weight"] = matrix(hidden, width)
        found[f"{prefix}mlp.down_proj.weight"] = matrix(width, hidden)
    found["model.norm.weight"] = scale(width)
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = matrix(config["vocab_size"], width)
    return found


def write_folder(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Any], *, files: int = 1
) -> Path:
    """A model's folder; with several files there is an index."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder / "tokenizer.json")
    if files == 1:
        save_file(dict(weights), folder / "model.safetensors")
        return folder
    places: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = dict(list(weights.items())[number::files])
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def vocabulary() -> tuple[list[str], list[str]]:
    """256 bytes, the marks of ChatML, some merges: as byte-level BPE writes them."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r")]
    merged = [left + right for left, right in merges]
    marks = ["<|im_start|>", "<|im_end|>"]
    filler = [f"<filler{number}>" for number in range(VOCABULARY - 258 - len(merged))]
    return [*letters, *marks, *merged, *filler], [" ".join(pair) for pair in merges]


def write_tokenizer(path: Path) -> None:
    """A tokenizer.json of that vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = vocabulary()
    pairs = [(left, right) for left, right in (one.split(" ") for one in merges)]
    inner = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs)
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(
        [AddedToken(one, special=True) for one in ("<|im_start|>", "<|im_end|>")]
    )
    inner.save(str(path))


def write_gguf(
    path: Path, config: Mapping[str, Any], weights: Tensors, *, quantised: Any = None
) -> Path:
    """The same model as llama.cpp's converter writes it: the rows of Llama's q and k permuted.

    `quantised`: the type of gguf that matrices are written as.
    """
    from gguf import GGUFWriter, quantize

    kind = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", config["hidden_size"] // heads)
    writer = GGUFWriter(path, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    for name, values in weights.items():
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _permuted(values, heads if "q_proj" in name else shared)
        if quantised is not None and values.ndim == 2:
            writer.add_tensor(_gguf_name(name), quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(_gguf_name(name), values)
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(_linear())
        writer.add_rope_scaling_factor(scaling["factor"])
    elif scaling:
        from tests.trainer.reference import scaled

        plain = config["rope_theta"] ** (-np.arange(0, size, 2) / size)
        writer.add_tensor("rope_freqs.weight", (plain / scaled(scaling, plain)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _linear() -> Any:
    from gguf import RopeScalingType

    return RopeScalingType.LINEAR


def _permuted(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """As convert_hf_to_gguf.py does for Llama."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_PARTS[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"
