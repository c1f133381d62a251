"""Random checkpoints of every architecture that PAT supports, with a tokenizer."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pat_vllm.cli import random_tokenizer
from pat_vllm.doctor import models
from pat_vllm.files.writing import forgotten
from tests.support import families
from tests.support.families import RandomModel


def make_model(path: str | Path, **sizes: Any) -> int:
    """Write a `RandomModel` with these fields and its tokenizer; return its parameters' number."""
    model, folder = RandomModel(**sizes), Path(path)
    config = families.config_of(model)
    parameters = models.write_checkpoint(folder, config, model.weights)
    if model.arch == "mixtral":
        _rename(folder / "model.safetensors", _MIXTRAL)
    random_tokenizer.save_tokenizer(folder, model.vocab, model.max_position_embeddings)
    return parameters


_MIXTRAL = {
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}
"""Parts of weights' names in published checkpoints of Mixtral, by those of other mixtures."""


def _rename(file: Path, parts: Mapping[str, str]) -> None:
    """Give a checkpoint's weights the names that published ones have."""
    from safetensors.torch import load_file, save_file

    weights = {}
    for name, weight in load_file(file).items():
        for ours, theirs in parts.items():
            name = name.replace(ours, theirs)
        weights[name] = weight
    save_file(weights, file, metadata={"format": "pt"})


def kept_model(
    directory: Path,
    name: str,
    sizes: Mapping[str, Any],
    finish: Callable[[Path], object] = lambda path: None,
) -> Path:
    """A random checkpoint that is made on the first call, and again when its modules change.

    Several processes may ask for the same one at once.

    Args:
        name: what the checkpoint's folder in `directory` begins with.
        sizes: fields of `RandomModel`.
        finish: changes the files that were made, before anybody sees them.
    """
    key = json.dumps([vars(RandomModel(**sizes)), finish.__qualname__]).encode()
    makers = [
        families.__file__,
        models.__file__,
        random_tokenizer.__file__,
        inspect.getfile(finish),
    ]
    for module in (__file__, *makers):
        key += Path(module).read_bytes()
    target = directory.resolve() / f"{name}-{hashlib.sha256(key).hexdigest()[:12]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete, so that an interrupted run leaves no half of a model behind.
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    for left in target.parent.glob(f".{name}-*"):
        if forgotten(left, scratch.stat().st_mtime):
            shutil.rmtree(left, ignore_errors=True)
    try:
        make_model(scratch, **sizes)
        finish(scratch)
        scratch.rename(target)
    except OSError:
        # Another process was first: a directory can't be renamed onto one that is not empty.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
