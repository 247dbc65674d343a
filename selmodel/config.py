"""Checks of a composed configuration before any work, and building objects from it."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from selmodel.errors import UserError
from selmodel.naming import run_name
from selmodel.privacy import secret_faults

TRAIN_KEYS = (
    "attention", "model", "data", "tokenizer", "optim", "trainer", "logger", "callbacks", "seed", "runs_root",
    "run_dir", "resume", "cache_dir", "micro_batch_tokens", "compile", "sample", "plan", "replay", "sweep", "guards",
)  # fmt: skip

# Constructor parameters that the program fills in itself, so that no option can set them.
_FILLED_IN = {
    "attention": ("d_model", "n_heads", "head_dim", "n_kv_heads"),
    "model": ("vocab_size", "attention"),
    "data": ("tokenizer",),
    "logger.wandb": ("directory", "run_config"),
    "callbacks.checkpoint": ("directory", "identity"),
}


def register_resolvers() -> None:
    """Make the functions and plugins that configurations use known to Hydra; call before composing.

    ``${run_name:}``: the run's name from what was typed. ``${expand_user:PATH}``. ``${sequences:TOKENS,CONTEXT}``: how
    many sequences of a context hold so many tokens. ``${product:A,B}``.
    """
    # Beside configs/, and on the path already where a script of that folder was started.
    root = str(Path(__file__).resolve().parent.parent)
    if root not in sys.path:
        sys.path.append(root)
    import hydra_plugins.selmodel_sweep  # noqa: F401 - registers the sweeper and the launcher

    OmegaConf.register_new_resolver("sequences", _sequences, replace=True)
    OmegaConf.register_new_resolver("product", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("expand_user", lambda path: str(Path(path).expanduser()), replace=True)
    OmegaConf.register_new_resolver(
        "run_name", lambda: run_name(HydraConfig.get().overrides.task), replace=True, use_cache=False
    )


def _sequences(tokens: int, context_length: int) -> int:
    if not isinstance(context_length, int) or context_length < 1 or tokens % context_length:
        raise UserError(
            f"model.context_length={context_length}: must divide the {tokens:,} tokens that this experiment "
            "keeps fixed; choose a power of two, or set data.batch_size and data.validation_sequences"
        )
    return tokens // context_length


def did_you_mean(name: str, known: list[str] | tuple[str, ...]) -> str:
    """A suggestion for a mistyped name, as the end of a sentence; empty when nothing is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def check_options(cfg: DictConfig, known: tuple[str, ...] = TRAIN_KEYS) -> None:
    """Refuse options that nothing reads, and values of a type that their constructor does not take.

    Raises:
        UserError: with all faults at once, each with the name as typed and what was expected.
    """
    faults = [
        f"{key}: no such option{did_you_mean(str(key), known)} (expected one of {', '.join(known)})"
        for key in cfg
        if key not in known
    ]
    raw = OmegaConf.to_container(cfg, resolve=False)
    if secrets := secret_faults(raw):  # before anything else could repeat them
        raise UserError("\n".join(secrets))
    for path, node in _targets(raw):
        faults += _unknown_arguments(path, node, raw) or _wrong_types(path, OmegaConf.select(cfg, path))
    if faults:
        raise UserError("\n".join(faults))


def _targets(node: Any, path: str = "") -> Iterator[tuple[str, dict]]:
    """Every mapping with a ``_target_`` below ``node``, with its dotted path."""
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        yield path, node
    for key, value in node.items():
        yield from _targets(value, f"{path}.{key}" if path else str(key))


def _unknown_arguments(path: str, node: dict, root: dict) -> list[str]:
    target = node["_target_"]
    try:
        parameters = inspect.signature(get_object(target)).parameters
    except Exception as error:
        return [f"{path}._target_={target}: cannot be imported ({error}); expected package.module.Class"]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return []
    known = [name for name in parameters if name not in _FILLED_IN.get(path, ())]
    shorthands = _shorthands(path, node, root)
    return [
        f"{path}.{key}: no such option of {target.rsplit('.', 1)[-1]}{did_you_mean(str(key), known + shorthands)} "
        f"(expected one of {', '.join(sorted(set(known + shorthands)))})"
        for key in node
        if not str(key).startswith("_") and key not in known and key not in shorthands
    ]


def _wrong_types(path: str, node: DictConfig) -> list[str]:
    """Scalars of another type than the constructor's annotation names, such as a word where a number belongs."""
    hints = _hints(get_object(node["_target_"]))
    faults = []
    for key in node:
        wanted = _scalar_types(hints.get(str(key)))
        if not wanted or str(key).startswith("_") or OmegaConf.is_missing(node, key):
            continue
        value = node[key]
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if type(value) not in wanted and not (is_int and float in wanted):
            names = " or ".join(sorted(_TYPE_NAMES[one] for one in wanted))
            faults.append(f"{path}.{key}={value}: expected {names}")
    return faults


_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
}


def _hints(target: Any) -> dict[str, Any]:
    """Annotations of the parameters, without those that exist for type checkers only."""
    function = target.__init__ if inspect.isclass(target) else target
    namespace = getattr(function, "__globals__", {})
    hints = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        try:
            hints[name] = eval(hint, namespace) if isinstance(hint, str) else hint  # an annotation in our own source
        except NameError:
            continue
    return hints


def check_scalars(cfg: DictConfig, expected: dict[str, tuple[type, ...]]) -> list[str]:
    """Faults of top-level values that are not of one of the types expected of them."""
    return [
        f"{name}={cfg[name]}: expected {' or '.join(_TYPE_NAMES[one] for one in types_)}"
        for name, types_ in expected.items()
        if type(cfg[name]) not in types_
    ]


def _scalar_types(hint: Any) -> set[type]:
    """The types that a scalar annotation allows; empty when it names anything but scalars."""
    allowed = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    return allowed if allowed <= set(_TYPE_NAMES) else set()


def _shorthands(path: str, node: dict, root: dict) -> list[str]:
    """Keys of a node that other values refer to, such as ``data.root`` for ``data.source.root``."""
    referred = set(re.findall(r"\$\{([\w.]+)\}", str(root)))
    return [key for key in node if f"{path}.{key}" in referred]


def build(node: DictConfig, **arguments: Any) -> Any:
    """The component that ``node`` names: ``_target_`` called with the node's options and ``arguments``.

    As ``hydra.utils.instantiate`` (``_partial_`` and nested ``_target_`` nodes included), except that shorthand keys,
    which only other values refer to, are left out, that options arrive as plain containers, and that what the
    component raises comes as it is.
    """
    target = get_object(node["_target_"])
    parameters = inspect.signature(target).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    options = {}
    for key in node:
        if str(key).startswith("_") or key in arguments or not (key in parameters or takes_any):
            continue
        value = node[key]
        if OmegaConf.is_dict(value):
            value = build(value) if "_target_" in value else plain(value)
        options[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_list(value) else value
    if node.get("_partial_", False):
        return functools.partial(target, **options, **arguments)
    return target(**options, **arguments)


def plain(cfg: DictConfig) -> dict:
    """``cfg`` with all references resolved, as plain dictionaries, lists and scalars."""
    return OmegaConf.to_container(cfg, resolve=True)
