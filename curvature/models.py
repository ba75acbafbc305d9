"""Loading causal language models for curvature work: dropout off, no cache, exact attention, any context length."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from curvature import positions
from curvature.hub import hub_reachable
from curvature.positions import ExtendPositions, PositionExtension
from curvature.shipped import shipped_path
from curvature.storage import spare_bytes
from flashbob import register_attention

__all__ = ["Architecture", "LoadedModel", "ModelInfo", "architectures", "load_model", "shallow_model"]

_T = TypeVar("_T")

EMBEDDED = "tiny"
"""Name of the model that comes with the project."""

_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
"""What transformers raises where files are absent, damaged, or not of the stated shape."""


@dataclass(frozen=True)
class Architecture:
    """A published configuration.

    Attributes:
        name: Short name.
        hub: Name on the model hub.
        parameters: Published number of parameters, tied weights once.
        config: Configuration entries, `model_type` among them.
    """

    name: str
    hub: str
    parameters: int
    config: dict[str, Any]

    def configuration(self) -> PretrainedConfig:
        """A new configuration object."""
        entries = dict(self.config)
        config: PretrainedConfig = AutoConfig.for_model(entries.pop("model_type"), **entries)
        return config


@dataclass(frozen=True)
class ModelInfo:
    """What a record says about the model.

    Attributes:
        name: As it was asked for.
        parameters: Number of parameters, tied weights once.
        revision: Commit on the hub, or None.
        path: Local folder, or None.
        random_init: Whether the weights are random.
        position_extension: How positions were extended, or None.
        tokenizer: Where the tokenizer comes from.
        attention: Attention implementation.
        dtype: Parameter dtype.
    """

    name: str
    parameters: int
    revision: str | None
    path: str | None
    random_init: bool
    position_extension: PositionExtension | None
    tokenizer: str
    attention: str
    dtype: str

    def as_record(self) -> dict[str, Any]:
        """These facts as JSON fields."""
        return asdict(self)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for curvature work.

    Attributes:
        model: In evaluation mode, dropout rates zero, no cache.
        tokenizer: Its tokenizer; never warns about lengths.
        info: Facts for the record.
        notices: One-line remarks for the user.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    info: ModelInfo
    notices: list[str]


@cache
def architectures() -> dict[str, Architecture]:
    """The built-in architectures by short name."""
    text = (Path(__file__).parent / "architectures.yaml").read_text(encoding="utf-8")
    return {name: Architecture(name, **entry) for name, entry in yaml.safe_load(text).items()}


def load_model(
    name_or_path: str,
    *,
    random_init: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seq: int | None = None,
    extend_positions: ExtendPositions = "interpolate",
    attention: str = "flashbob",
    seed: int = 0,
) -> LoadedModel:
    """Load a causal language model, or make one with random weights.

    Args:
        name_or_path: "tiny" (the embedded model), a local folder, a built-in architecture or a hub name. The local
            cache is asked first, then the hub.
        random_init: Random weights from the configuration. Built-in architectures then need no hub. Weights are drawn
            in float32 on the CPU, so that they depend on the seed alone and not on dtype and device.
        dtype: float64, float32, bfloat16 or float16.
        device: Where to put the model.
        seq: Sequence length to come; beyond the model's positions `extend_positions` applies.
        extend_positions: See `curvature.positions.extend`.
        attention: "flashbob", or any attention implementation of transformers ("eager" has a second derivative too).
        seed: Seed of random weights.

    Returns:
        The model, its tokenizer, facts and notices.

    Raises:
        ValueError: If there is no such model or no tokenizer, weights are missing, or positions do not suffice.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
    if attention == "flashbob":
        register_attention()
    notices: list[str] = []
    source = _resolve(name_or_path)
    with _quiet():
        config = _configuration(source, random_init)
        _switch_off_dropout(config)
        if random_init:
            model = _random_model(config, dtype, attention, seed)
        else:
            model = _pretrained_model(source, config, dtype, attention, notices)
        tokenizer, tokenizer_source = _tokenizer(source, config, random_init)
    if tokenizer_source == EMBEDDED and source.shown != EMBEDDED:
        notices.append(f"no tokenizer of {name_or_path} at hand; the text is tokenized with the embedded model's")
    tokenizer.model_max_length = int(1e30)
    extension = None if seq is None else positions.extend(model, seq, extend_positions)
    if extension is not None:
        notices.append(extension.notice)
    nn.Module.to(model, device)
    model.eval()
    info = ModelInfo(
        name=name_or_path,
        parameters=sum(p.numel() for p in model.parameters()),
        revision=None if source.folder else getattr(config, "_commit_hash", None),
        path=str(source.folder) if source.folder else None,
        random_init=random_init,
        position_extension=extension,
        tokenizer=tokenizer_source,
        attention=attention,
        dtype=str(dtype).removeprefix("torch."),
    )
    return LoadedModel(model, tokenizer, info, notices)


def shallow_model(
    name_or_path: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, int]:
    """A model of the same architecture with random weights and as few layers as can stand for all, for forecasts.

    These are the first ones, as many as it takes that every kind is among them, and that layers of the same class and
    parameter shapes have the share that they have in the whole model: its parameters outside the layers, and those of
    the layers times the depths' ratio, are then as many as the whole model's. Where there are no such first layers, or
    the configuration does not allow so few, the model keeps its depth.

    Args:
        name_or_path: See `load_model`. Only the configuration is read.
        dtype: Dtype of the weights.
        device: Where to put the model.

    Returns:
        The model, in evaluation mode, and the number of layers of the one that it stands for.

    Raises:
        ValueError: If there is no such model, or so many layers of it do not fit into this machine's memory.
    """
    register_attention()
    source = _resolve(name_or_path)
    with _quiet():
        config = _configuration(source, random_init=True)
        _switch_off_dropout(config)
        depth = int(config.get_text_config().num_hidden_layers)
        config, parameters = _shallow(config, depth)
        if 4 * parameters > spare_bytes(torch.device("cpu")):
            raise ValueError(
                f"model {source.shown!r}: a forecast runs {config.get_text_config().num_hidden_layers} of its {depth} "
                f"layers, and their {parameters:,} parameters do not fit into this machine's memory in float32"
            )
        model = _random_model(config, dtype, "flashbob", seed=0)
    nn.Module.to(model, device)
    return model.eval(), depth


def _shallow(config: PretrainedConfig, depth: int) -> tuple[PretrainedConfig, int]:
    """The configuration of `shallow_model`, and its number of parameters."""
    whole, layers = _outline(config, depth)
    structures = [(type(layer), tuple(p.shape for p in layer.parameters())) for layer in layers]
    types = getattr(config.get_text_config(), "layer_types", None) or [None] * len(layers)
    kinds = list(zip(structures, types, strict=False))
    fewest = next((n for n in range(1, len(kinds)) if _stand_for_all(kinds[:n], kinds)), depth)
    if fewest < depth:
        shallow = copy.deepcopy(config)
        text = shallow.get_text_config()
        try:
            with suppress(AttributeError):  # many configurations derive it from the depth
                text.layer_types = types[:fewest] if types[0] else None
            text.num_hidden_layers = fewest
            count, found = _outline(shallow, fewest)
        except Exception:  # whatever else a configuration holds for each layer, it does not allow so few
            return config, whole
        inner = sum(p.numel() for p in found.parameters())
        if len(found) == fewest and fewest * (whole - count) == (depth - fewest) * inner:
            return shallow, count
    return config, whole


def _stand_for_all(some: Sequence[tuple[object, object]], kinds: Sequence[tuple[object, object]]) -> bool:
    """Whether some layers (structure, type) are of all kinds, with the structures in the same proportions."""
    counts = [Counter(structure for structure, _ in each) for each in (some, kinds)]
    return set(some) == set(kinds) and all(
        counts[0][structure] * len(kinds) == count * len(some) for structure, count in counts[1].items()
    )


def _outline(config: PretrainedConfig, depth: int) -> tuple[int, nn.ModuleList]:
    """Number of parameters and layers of a model, none of it in memory; no layers, where there is no list of them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="flashbob")
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth)
    return sum(p.numel() for p in model.parameters()), next(lists, nn.ModuleList())


@dataclass(frozen=True)
class _Source:
    """Where a model comes from: a local folder or names on the hub; and the built-in architecture it is, if any."""

    shown: str
    names: tuple[str, ...]
    folder: Path | None
    architecture: Architecture | None


def _resolve(name: str) -> _Source:
    if name == EMBEDDED:
        folder = shipped_path("models/tiny-gpt2")
        return _Source(name, (str(folder),), folder, None)
    folder = Path(name).expanduser()
    if folder.is_file():
        raise ValueError(f"model {name!r}: it is a file; give the folder that holds config.json and the weights")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model {name!r}: the folder holds no config.json; write one with save_pretrained")
        return _Source(name, (str(folder),), folder, None)
    if name.startswith((".", "/", "~")):
        raise ValueError(f"model {name!r}: there is no such folder")
    known = architectures()
    architecture = next((a for a in known.values() if name.lower() in (a.name, a.hub.lower())), None)
    return _Source(name, (name,) if architecture is None else (architecture.hub, architecture.name), None, architecture)


def _configuration(source: _Source, random_init: bool) -> PretrainedConfig:
    if random_init and source.architecture is not None:
        return source.architecture.configuration()
    config: PretrainedConfig = _local_then_hub(source, AutoConfig.from_pretrained, random_init)
    return config


def _switch_off_dropout(config: PretrainedConfig) -> None:
    for entries in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(entries).items()):
            if isinstance(value, float) and name.endswith(("dropout", "pdrop", "layerdrop")):
                setattr(entries, name, 0.0)
        entries.use_cache = False


def _random_model(config: PretrainedConfig, dtype: torch.dtype, attention: str, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        )
    # Not model.to(dtype): that would round the rotary frequencies too, which a loaded model keeps in float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _pretrained_model(
    source: _Source, config: PretrainedConfig, dtype: torch.dtype, attention: str, notices: list[str]
) -> PreTrainedModel:
    def load(name: str, **options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, attn_implementation=attention, output_loading_info=True, **options
        )

    model: PreTrainedModel
    model, loading = _local_then_hub(source, load, random_init=False)
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"model {source.shown!r}: {len(missing)} weights are not in its files, among them {missing[0]!r}; "
            "the folder does not hold the whole model"
        )
    if unused := sorted(loading["unexpected_keys"]):
        notices.append(f"{source.shown}: {len(unused)} stored tensors are not part of the model, such as {unused[0]}")
    return model


def _tokenizer(source: _Source, config: PretrainedConfig, random_init: bool) -> tuple[PreTrainedTokenizerBase, str]:
    nothing = f"model {source.shown!r}: there is no tokenizer with it; add its tokenizer.json to the folder"
    try:
        tokenizer = _local_then_hub(source, AutoTokenizer.from_pretrained, random_init)
        if len(tokenizer) > 1:
            return tokenizer, source.shown
        raise ValueError(nothing)
    except ValueError as error:
        if not random_init:
            if source.folder is not None and not any(source.folder.glob("tokenizer*")):
                raise ValueError(nothing) from error
            raise
    folder = shipped_path("models/tiny-gpt2")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    vocabulary = config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"model {source.shown!r}: no tokenizer at hand, and the embedded one has {len(tokenizer)} tokens, more "
            f"than the model's {vocabulary}; give a local folder with a tokenizer"
        )
    return tokenizer, EMBEDDED


def _local_then_hub(source: _Source, load: Callable[..., _T], random_init: bool) -> _T:
    """Load from the folder or the local cache, and only if that fails from the hub.

    Raises:
        ValueError: One line that says what is missing and what to do.
    """
    for name in source.names:
        try:
            return load(name, local_files_only=True)
        except _UNREADABLE as error:
            local_error = error
    if source.folder is not None:
        reason = _first_line(local_error)
        raise ValueError(f"model {source.shown!r}: cannot be read from its folder: {reason}") from local_error
    remedy = "give the path of a local model folder"
    if not random_init and source.architecture is not None:
        remedy += ", or ask for random weights (--random-init), which needs no hub for this architecture"
    elif source.architecture is None:
        remedy += f", or one of the built-in architectures with --random-init: {', '.join(architectures())}"
    if not hub_reachable():
        where = "not in the local cache, and the model hub cannot be reached"
        raise ValueError(f"model {source.shown!r}: {where}; {remedy}")
    try:
        return load(source.names[0])
    except _UNREADABLE as error:
        raise ValueError(f"model {source.shown!r}: {_first_line(error)}; {remedy}") from error


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own remarks and bars: what matters in them is checked here and told as notices."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
