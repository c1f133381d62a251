"""What a user may ask for on the command line, checked before anything starts.

Imports neither vLLM nor Ray nor OpenRLHF, except to learn vLLM's version.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from pat_vllm.config import PATConfig
from pat_vllm.files.reading import read_json_object
from pat_vllm.models.checkpoint import config_file
from pat_vllm.models.drafters import instead_of
from pat_vllm.models.images import SERVED
from pat_vllm.models.model_classes import class_name
from pat_vllm.plugin import check_vllm_version

TESTED_OPENRLHF = "0.11.2"
"""The OpenRLHF release that this package is tested with."""

ALLOW_UNTESTED = "PAT_ALLOW_UNTESTED_OPENRLHF"
"""Environment variable that lets PAT run in another OpenRLHF release when set to 1."""

ENGINES = ("vllm", "pat")

_NGRAMS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
_OF_PAT = ("vllm.pat", "vllm.speculative_config")
"""Options of ours that say more about `--vllm_engine pat`."""


@dataclass(frozen=True)
class EngineOptions:
    """What the engines get besides OpenRLHF's arguments.

    Attributes:
        pat: `additional_config["pat"]`.
        speculative_config: vLLM's.
        num_engines: how many there are.
    """

    pat: dict[str, Any]
    speculative_config: dict[str, Any] | None = None
    num_engines: int = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add PAT's options to OpenRLHF's parser."""
    group = parser.add_argument_group("pat-vllm")
    group.add_argument(
        "--vllm.engine",
        "--vllm_engine",
        dest="vllm.engine",
        choices=ENGINES,
        default="vllm",
        help="pat: engines whose tensor parallelism changes during a rollout",
    )
    group.add_argument(
        "--vllm.pat",
        default=None,
        metavar="JSON",
        help='options of --vllm_engine pat, as in additional_config["pat"], for instance '
        "'{\"layouts\": [1, 4]}'",
    )
    group.add_argument(
        "--vllm.speculative_config",
        default=None,
        metavar="JSON",
        help="speculative decoding of --vllm_engine pat, as vLLM's --speculative-config, for "
        f"instance '{_NGRAMS}'",
    )


def take_options(args: argparse.Namespace) -> EngineOptions | None:
    """The checked options of ours, or None where `--vllm_engine vllm` leaves OpenRLHF as it is.

    Raises:
        ValueError: names the option, its value, what is allowed, and the way out.
    """
    flat = vars(args)
    if flat["vllm.engine"] == "vllm":
        for name in _OF_PAT:
            if flat[name] is not None:
                raise ValueError(
                    f"--{name} {flat[name]!r} is for --vllm_engine pat, not vllm; "
                    "change one of the two"
                )
        # OpenRLHF logs its arguments, and may one day have options of these names.
        for name in ("vllm.engine", *_OF_PAT):
            del flat[name]
        return None
    check_arguments(flat)
    options = parse_pat(flat["vllm.pat"], flat["vllm.tensor_parallel_size"])
    if flat.get("vllm.sync_with_ray") and options.get("launcher") == "mp":
        raise ValueError(
            "--vllm.sync_with_ray is for actors of Ray, and the workers of --vllm.pat "
            f"{flat['vllm.pat']!r} are none; leave one of the two out"
        )
    return EngineOptions(
        options, parse_speculation(flat["vllm.speculative_config"]), flat["vllm.num_engines"]
    )


def parse_pat(text: str | None, ranks: int) -> dict[str, Any]:
    """The options in `--vllm.pat`, valid for an engine of `ranks` ranks.

    Raises:
        ValueError: not JSON, not an object, an unknown option, or one that does not fit `ranks`.
    """
    where = f"--vllm.pat {text!r}"
    options = _object(
        "vllm.pat", "{}" if text is None else text, '{"layouts": [1, 4]}', PATConfig.model_fields
    )
    try:
        PATConfig.parse(options).resolve_layouts(ranks)
    except ValueError as error:
        message = str(error).removeprefix('additional_config["pat"]: ')
        raise ValueError(f"{where}: {message}") from None
    return _with_full_paths(options)


def parse_speculation(text: str | None) -> dict[str, Any] | None:
    """The speculative config in `--vllm.speculative_config`; vLLM checks the rest of it.

    Raises:
        ValueError: not JSON, not an object, or a method that PAT does not serve.
    """
    if text is None:
        return None
    allowed = ("method", "num_speculative_tokens", "and others of vLLM's")
    config = _object("vllm.speculative_config", text, _NGRAMS, allowed)
    if instead := instead_of(method := config.get("method")):
        raise ValueError(f"--vllm.speculative_config {text!r} has the method {method!r}; {instead}")
    return config


def _object(option: str, text: str, example: str, allowed: Iterable[str]) -> dict[str, Any]:
    where = f"--{option} {text!r}"
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{where} is not JSON ({error}); give an object in quotes of the shell, as in "
            f"--{option} '{example}'"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object; allowed options: {', '.join(allowed)}")
    return value


_FILES = frozenset({"profile", "state_dir"})


def _with_full_paths(options: dict[str, Any]) -> dict[str, Any]:
    """With all files as they are found from here; an engine runs where Ray starts it."""
    full = {
        name: os.path.abspath(value) if name in _FILES and value is not None else value
        for name, value in options.items()
    }
    if "policy" in options:
        full["policy"] = _with_full_paths(options["policy"])
    return full


def check_arguments(args: Mapping[str, Any]) -> None:
    """Refuse what PAT cannot do in OpenRLHF.

    Args:
        args: OpenRLHF's arguments by their dotted names.

    Raises:
        ValueError: names the option, its value, what is allowed, and the way out.
    """
    engines, ranks = args["vllm.num_engines"], args["vllm.tensor_parallel_size"]
    if not engines or engines < 1:
        raise ValueError(
            f"--vllm_engine pat needs a vLLM engine, but --vllm.num_engines is {engines}; use "
            "--vllm.num_engines 1 with --vllm.tensor_parallel_size set to the number of GPUs"
        )
    if ranks < 2:
        raise ValueError(
            f"--vllm_engine pat makes replicas of the GPUs of one engine, but "
            f"--vllm.tensor_parallel_size is {ranks}; use --vllm.num_engines 1 "
            f"--vllm.tensor_parallel_size {max(engines, 2)} in place of --vllm.num_engines "
            f"{engines}, or --vllm_engine vllm"
        )
    actors = args["actor.num_nodes"] * args["actor.num_gpus_per_node"]
    if colocated(args) and actors != engines * ranks:
        raise ValueError(
            f"--train.colocate_all puts the engines on the actor's GPUs: --vllm.num_engines "
            f"{engines} times --vllm.tensor_parallel_size {ranks} must be --actor.num_nodes "
            f"{args['actor.num_nodes']} times --actor.num_gpus_per_node "
            f"{args['actor.num_gpus_per_node']}; set --vllm.tensor_parallel_size to the GPUs of a "
            "node, and --vllm.num_engines to the number of nodes"
        )
    if colocated(args) and ranks > args["actor.num_gpus_per_node"]:
        raise ValueError(
            f"a PAT engine does not span nodes, but --vllm.tensor_parallel_size is {ranks} and "
            f"--actor.num_gpus_per_node is {args['actor.num_gpus_per_node']}; use one engine for "
            "each node"
        )
    for option, value, why in (
        (
            "--train.full_determinism_enable",
            args["train.full_determinism_enable"],
            "PAT decides by measured times when to switch, so that two runs differ in rounding "
            "and in random numbers",
        ),
        (
            "--data.max_images_per_prompt",
            args["data.max_images_per_prompt"] if (name := _without_images(args)) else 0,
            f"PAT serves {name} with text alone, and with images {', '.join(SERVED)}",
        ),
    ):
        if value:
            raise ValueError(
                f"{option} {value} does not go with --vllm_engine pat: {why}. Leave it out, or "
                "use --vllm_engine vllm"
            )


def _without_images(args: Mapping[str, Any]) -> str | None:
    """The class of the model if PAT serves it without images; None: with, or it is not on this
    disk, and vLLM finds out when an engine starts."""
    file = config_file(args["actor.model_name_or_path"] or "")
    if file is None:
        return None
    name = class_name(read_json_object(file, "model config"))
    return None if name in SERVED else name


def colocated(args: Mapping[str, Any]) -> bool:
    """Whether the engines share the actor's GPUs (OpenRLHF's hybrid engine)."""
    return bool(args["train.colocate_all"]) and not args["train.async_enable"]


def check_gpus(args: Mapping[str, Any], gpus_of_nodes: Sequence[float]) -> None:
    """Refuse a command for which the cluster has too few GPUs. OpenRLHF would wait for ever.

    Args:
        args: OpenRLHF's arguments by their dotted names.
        gpus_of_nodes: GPUs of each node of the Ray cluster.

    Raises:
        ValueError: names the options and what there is.
    """
    engines, ranks = args["vllm.num_engines"], args["vllm.tensor_parallel_size"]
    widest = max(gpus_of_nodes, default=0)
    if ranks > widest:
        raise ValueError(
            f"--vllm.tensor_parallel_size {ranks} needs a node with {ranks} GPUs, and the nodes "
            f"of the Ray cluster have {[int(gpus) for gpus in gpus_of_nodes]}; a PAT engine does "
            "not span nodes: use one engine for each node, as wide as the node"
        )
    actors = args["actor.num_nodes"] * args["actor.num_gpus_per_node"]
    needed = engines * ranks + (0 if colocated(args) else actors)
    if needed > sum(gpus_of_nodes):
        beside = "" if colocated(args) else f", and --actor.num_gpus_per_node {actors} in all"
        raise ValueError(
            f"--vllm.num_engines {engines} times --vllm.tensor_parallel_size {ranks}{beside} need "
            f"{needed} GPUs, and the Ray cluster has {int(sum(gpus_of_nodes))}; use fewer, or "
            "start Ray on more nodes first"
        )
    room = sum(int(gpus) // ranks for gpus in gpus_of_nodes)
    if engines > room:
        raise ValueError(
            f"--vllm.num_engines {engines} of --vllm.tensor_parallel_size {ranks} do not fit the "
            f"nodes of the Ray cluster, which have {[int(gpus) for gpus in gpus_of_nodes]} GPUs: "
            f"a PAT engine does not span nodes, so that there is room for {room}; use fewer, or "
            "narrower ones, or start Ray on more nodes first"
        )


_WAY_OUT = f"pip install --no-deps openrlhf=={TESTED_OPENRLHF}"


def check_installed() -> None:
    """Refuse to start without OpenRLHF or vLLM.

    Raises:
        ValueError: names the package and what to install.
    """
    if find_spec("openrlhf") is None:
        raise ValueError(f"OpenRLHF is not installed: {_WAY_OUT}")
    if find_spec("vllm") is None:
        raise ValueError('vLLM is not installed: pip install "pat-vllm[cuda,openrlhf]"')


def check_versions() -> None:
    """Refuse an OpenRLHF or a vLLM that PAT was not tested with.

    Raises:
        ValueError: names the package, its version, and what to install.
    """
    version = metadata.version("openrlhf")
    if version != TESTED_OPENRLHF and os.environ.get(ALLOW_UNTESTED) != "1":
        raise ValueError(
            f"--vllm_engine pat is tested with OpenRLHF {TESTED_OPENRLHF}, but {version} is "
            f"installed: {_WAY_OUT}, or set {ALLOW_UNTESTED}=1 to try this one"
        )
    check_vllm_version()
