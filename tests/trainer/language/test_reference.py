"""Models and tokenizers give what the reference libraries give: transformers, torch, peft.

Always compared is what these have once given, kept in reference_data (`make_reference` writes it);
with the extra `reference` also what they give now, and what they read of an export.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.trainer import make_reference, models
from tests.trainer import tokenizers_made as made
from trainer.config import MATRICES, OptimizerSettings
from trainer.data.tokenizer import SubwordTokenizer
from trainer.language import model
from trainer.language.optimizer import make_optimizer
from trainer.language.pretrained.export import export, tensors_of
from trainer.language.pretrained.model import open_pretrained
from trainer.language.pretrained.tokenizer_files import read_tokenizer

pytest.importorskip("safetensors", reason="needs the extra finetune")
pytest.importorskip("tokenizers", reason="needs the extra finetune")
pytest.importorskip("jinja2", reason="needs the extra finetune")

OPTIMIZER = OptimizerSettings(
    learning_rate=make_reference.LEARNING_RATE,
    final_fraction=1.0,
    warmup_steps=0,
    weight_decay=make_reference.DECAY,
    beta1=make_reference.BETAS[0],
    beta2=make_reference.BETAS[1],
    gradient_norm_max=1e30,
)


def trained_by_us(folder: Path) -> dict[str, Any]:
    """What `make_reference.trained_by_transformers` gives, by the model of the house."""
    found = open_pretrained(str(folder), "/")
    architecture = found.architecture
    params = {name: jnp.asarray(value.whole()) for name, value in found.values.items()}
    rows = make_reference.rows()
    logits = jax.jit(functools.partial(model.forward, architecture))(params, rows[0][:, :-1])
    optimizer = make_optimizer(
        OPTIMIZER, steps=make_reference.STEPS, decayed=model.decayed(architecture.shapes)
    )
    state = optimizer.init(params)
    step = jax.jit(jax.value_and_grad(functools.partial(model.loss, architecture)))
    losses, gradients = [], {}
    for number, batch in enumerate(rows):
        loss, found_gradients = step(params, jnp.asarray(batch))
        if number == 0:
            gradients = tensors_of(architecture, found_gradients)
        updates, state = optimizer.update(found_gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    sampled = make_reference.sampled
    return {
        "logits": np.asarray(logits)[:, ::4, ::16].tolist(),
        "gradients": {name: sampled(one) for name, one in gradients.items()},
        "losses": losses,
        "parameters": {
            name: sampled(one) for name, one in tensors_of(architecture, params).items()
        },
    }


def assert_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """All of it to a few units in the last place of float32."""
    logits = np.array(theirs["logits"])
    np.testing.assert_allclose(ours["logits"], logits, atol=1e-5 * np.abs(logits).max())
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-5)
    # A parameter moves by up to six learning rates, whatever the size of its gradient.
    for kind, tolerance in (("gradients", 1e-5), ("parameters", 2e-4)):
        assert ours[kind].keys() == theirs[kind].keys()
        for name, values in theirs[kind].items():
            size = np.abs(values).max()
            np.testing.assert_allclose(
                ours[kind][name], values, atol=tolerance * size, err_msg=f"{kind} of {name}"
            )


def kept(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((make_reference.FOLDER / f"{kind}.json").read_text())
    return found


@pytest.mark.parametrize("kind", make_reference.KINDS)
def test_six_steps_of_training_are_those_of_the_reference(kind: str, tmp_path: Path) -> None:
    """A model that computes another gradient still trains, and is another model."""
    ours = trained_by_us(make_reference.write_model(tmp_path / "model", kind))
    assert_alike(ours, kept(kind))


def cut_by_us(tokenizer: SubwordTokenizer, *, chats: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"texts": [tokenizer.encode(text) for text in made.NASTY]}
    if chats:
        passages = [
            tokenizer.conversation(made.TALK),
            tokenizer.conversation(made.TALK[:-1], reply=True),
        ]
        for name, (ids, _) in zip(("chat", "reply"), tokenizer.encode_many(passages), strict=True):
            found[name] = ids
    return found


@pytest.mark.parametrize("kind", made.MADE)
def test_texts_and_conversations_are_cut_as_by_the_reference(kind: str, tmp_path: Path) -> None:
    """One token too many in each text is another text."""
    config = make_reference.write_tokenizer(tmp_path / "model", kind)
    theirs = kept(kind)
    tokenizer = read_tokenizer(tmp_path / "model", config)
    assert cut_by_us(tokenizer, chats="chat" in theirs) == theirs


# ------------------------------------------------------------------------- the libraries themselves


def transformers() -> Any:
    """The library, and torch with it; a full run counts its lack as a failure."""
    pytest.importorskip("torch", reason="needs the extra reference")
    return pytest.importorskip("transformers", reason="needs the extra reference")


@pytest.mark.parametrize("kind", make_reference.KINDS)
def test_the_kept_steps_are_what_the_installed_libraries_give(kind: str, tmp_path: Path) -> None:
    """Data that nobody can make again prove nothing."""
    transformers()
    folder = make_reference.write_model(tmp_path / "model", kind)
    assert_alike(make_reference.trained_by_transformers(folder), kept(kind))


@pytest.mark.parametrize("kind", made.MADE)
def test_the_kept_tokens_are_what_the_installed_libraries_give(kind: str, tmp_path: Path) -> None:
    """Data that nobody can make again prove nothing."""
    transformers()
    make_reference.write_tokenizer(tmp_path / "model", kind)
    assert make_reference.cut_by_transformers(tmp_path / "model", kind) == kept(kind)


def exported(folder: Path, kind: str, tokenizer: str) -> tuple[Path, Any]:
    """A model with a tokenizer that fits it, after it went through ours."""
    source = folder / "model"
    given = made.write(folder / "tokenizer", tokenizer)
    config = {**models.FAMILY[make_reference.KINDS[kind]], **given}
    models.write_folder(source, config, models.tensors(config))
    for file in (folder / "tokenizer").iterdir():
        file.rename(source / file.name)
    found = open_pretrained(str(source), "/")
    params = {name: value.whole() for name, value in found.values.items()}
    export(folder / "out", found.architecture, params, found.read_tokenizer())
    return source, folder / "out"


@pytest.mark.parametrize(
    ("kind", "tokenizer"), list(zip(make_reference.KINDS, made.MADE, strict=True))
)
def test_an_export_is_read_by_the_reference_as_what_it_came_from(
    kind: str, tokenizer: str, tmp_path: Path
) -> None:
    """Template, first token and all eos ids but one were lost on the way."""
    library = transformers()
    source, out = exported(tmp_path, kind, tokenizer)
    before, after = (library.AutoTokenizer.from_pretrained(one) for one in (source, out))
    assert [after(text)["input_ids"] for text in made.NASTY] == [
        before(text)["input_ids"] for text in made.NASTY
    ]
    assert after.chat_template == before.chat_template
    assert after.special_tokens_map == before.special_tokens_map
    ends = library.GenerationConfig.from_pretrained(source).eos_token_id
    assert library.GenerationConfig.from_pretrained(out).eos_token_id == ends
    config = library.AutoConfig.from_pretrained(out)
    assert config.eos_token_id == ends
    assert config.bos_token_id == before.bos_token_id
    assert_same_logits(library, source, out)


def assert_same_logits(library: Any, source: Path, out: Path) -> None:
    import torch

    tokens = torch.tensor(make_reference.rows()[0])
    with torch.no_grad():
        one, other = (
            library.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
            for path in (source, out)
        )
    np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-5 * float(one.abs().max()))


def test_low_rank_additions_are_those_of_the_reference(tmp_path: Path) -> None:
    """alpha / rank, which factor is which, and where they are added: peft says."""
    library = transformers()
    peft = pytest.importorskip("peft", reason="needs the extra reference")
    import torch

    folder = make_reference.write_model(tmp_path / "model", "llama")
    found = open_pretrained(str(folder), "/")
    base: dict[str, Any] = {name: value.whole() for name, value in found.values.items()}
    low_rank = model.init_low_rank(found.architecture, 4, MATRICES, jax.random.key(1))
    key = jax.random.key(2)
    low_rank = {
        name: one + 0.1 * jax.random.normal(key, one.shape) for name, one in low_rank.items()
    }
    compute = model.Compute(low_rank_scale=8.0 / 4)
    tokens = make_reference.rows()[0]
    ours = model.forward(found.architecture, {**base, **low_rank}, tokens, compute=compute)
    names = {"query": "q", "key": "k", "value": "v", "attention_out": "o"}
    names |= {name: name for name in ("gate", "up", "down")}
    targets = [f"{one}_proj" for one in names.values()]
    whole = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(whole, config)
    values = {f"{one}_proj": name for name, one in names.items()}
    filled = 0
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" not in name:
                continue
            parts = name.split(".")
            end = "_low" if "lora_A" in parts else "_high"
            target = next(part for part in parts if part in values)
            block = int(parts[parts.index("layers") + 1])
            factor = np.asarray(low_rank[values[target] + end])[block].T
            parameter.copy_(torch.tensor(np.ascontiguousarray(factor)))
            filled += 1
        assert filled == 2 * len(MATRICES) * found.architecture.layers
        theirs.eval()
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())


def test_a_folder_that_the_library_datasets_saved_is_read(tmp_path: Path) -> None:
    """Its files are its own business; only it can say what they look like now."""
    datasets = pytest.importorskip("datasets", reason="needs the extra reference")
    from trainer.data.documents import read_records, records_of
    from trainer.data.tokenizer import BytesTokenizer

    rows = [{"text": f"row {number}"} for number in range(100)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=3)
    records = records_of("dataset", [tmp_path / "saved"], "text")
    parts = read_records(records, BytesTokenizer(), "text")
    assert [bytes(part.tokens).decode() for part in parts] == [row["text"] for row in rows]


def test_a_sentencepiece_model_cuts_as_the_tokenizer_that_was_made_from_it(tmp_path: Path) -> None:
    """The reference of the reference: Llama 2 and Mistral were trained with this library."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra reference")
    library = transformers()
    (tmp_path / "text.txt").write_text(made.TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    inner = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    about = {"tokenizer_class": "LlamaTokenizer", "legacy": False, **made.MADE["spm-legacy"][1]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    library.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    ours = read_tokenizer(tmp_path / "saved", {"eos_token_id": 2})
    # transformers itself cuts a space at the start, and marks within a text, in another way.
    for text in made.NASTY:
        if "<s>" not in text and not text.startswith(" "):
            assert ours.encode(text)[len(ours.opening) :] == inner.encode(text), text
