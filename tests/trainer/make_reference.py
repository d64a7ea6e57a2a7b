"""Write what the reference libraries make of small models and tokenizers: the data of the tests.

    python -m tests.trainer.make_reference        # needs the extra reference

The files in tests/trainer/reference_data are small and committed, so that every run compares with
them; with the extra installed the tests compare with the libraries themselves too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.trainer import models
from tests.trainer import tokenizers_made as made

FOLDER = Path(__file__).with_name("reference_data")
KINDS = {"llama": "llama-scaled", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Of each kind the configuration in `models.FAMILY`."""

STEPS = 6
LEARNING_RATE, DECAY, BETAS, EPSILON = 1e-2, 0.1, (0.9, 0.95), 1e-8
SHOWN = 8
"""So many numbers of each gradient and parameter are kept, spread over it."""


def rows() -> np.ndarray[Any, Any]:
    """The batch of each step: int64 `[steps, 2, 13]`."""
    return np.random.default_rng(5).integers(0, models.VOCABULARY, (STEPS, 2, 13))


def sampled(values: Any) -> list[float]:
    """Some numbers of an array, as the file has it, and its norm."""
    flat = np.asarray(values, np.float64).ravel()
    places = np.linspace(0, len(flat) - 1, min(SHOWN, len(flat))).astype(int)
    return [*flat[places].tolist(), float(np.sqrt((flat**2).sum()))]


def trained_by_transformers(folder: Path) -> dict[str, Any]:
    """Logits, gradients, and the losses and parameters of six steps of AdamW, by tensor."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    batches = torch.tensor(rows())
    with torch.no_grad():
        logits = model(batches[0][:, :-1]).logits.numpy()
    plain = [(n, p) for n, p in model.named_parameters() if not n.endswith(("norm.weight", "bias"))]
    others = [(n, p) for n, p in model.named_parameters() if n.endswith(("norm.weight", "bias"))]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in plain], "weight_decay": DECAY},
            {"params": [p for _, p in others], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
    )
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        found = model(batches[step][:, :-1]).logits
        wanted = batches[step][:, 1:].reshape(-1)
        loss = torch.nn.functional.cross_entropy(found.reshape(len(wanted), -1), wanted)
        loss.backward()
        if step == 0:
            gradients = {n: sampled(p.grad.numpy()) for n, p in model.named_parameters()}
        optimizer.step()
        losses.append(float(loss.detach()))
    after = {n: sampled(p.detach().numpy()) for n, p in model.named_parameters()}
    return {
        "logits": logits[:, ::4, ::16].tolist(),
        "gradients": gradients,
        "losses": losses,
        "parameters": after,
    }


def cut_by_transformers(folder: Path, kind: str) -> dict[str, Any]:
    """The ids of nasty texts and of a conversation."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found: dict[str, Any] = {"texts": [tokenizer(text)["input_ids"] for text in made.NASTY]}
    if tokenizer.chat_template:
        for name, reply in (("chat", False), ("reply", True)):
            talk = made.TALK[:-1] if reply else made.TALK
            text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=reply)
            found[name] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def write_model(folder: Path, kind: str) -> Path:
    """The model of a kind, as others write it."""
    config = models.FAMILY[KINDS[kind]]
    return models.write_folder(folder, config, models.tensors(config))


def write_tokenizer(folder: Path, kind: str) -> dict[str, Any]:
    """The tokenizer of a kind beside a config.json of the smallest model."""
    given = made.write(folder, kind)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **given}))
    return given


def main() -> int:
    """Write all files anew."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for kind in KINDS:
            found = trained_by_transformers(write_model(Path(temporary) / kind, kind))
            (FOLDER / f"{kind}.json").write_text(json.dumps(found) + "\n")
        for kind in made.MADE:
            folder = Path(temporary) / kind
            write_tokenizer(folder, kind)
            found = cut_by_transformers(folder, kind)
            (FOLDER / f"{kind}.json").write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
