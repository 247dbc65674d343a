"""Keeping secrets out of what a run writes and sends: refused where they are typed, hidden where they might slip in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HIDDEN = "***"
TEXTS = ("prompt", "text", "sample.prompt")  # options that hold prose, in which an address is no address

# Whole words between underscores, so that `micro_batch_tokens` and `live_keys` are none of them, nor is `eos_token`.
_SECRET_NAME = re.compile(
    r"(^|_)(password|passwd|secret|credentials?|(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)token|(api|access|private)_?key)(_|$)",
    re.IGNORECASE,
)
_SHORTEST_SECRET = 8  # characters; a shorter value of a variable would be found inside ordinary words
_LOGIN_IN_URL = re.compile(r"(://)[^/\s@]+@")
_QUERY_IN_URL = re.compile(r"(://[^\s?]*)\?\S+")
_SECRET_IN_QUERY = re.compile(
    r"://\S*[?&][^=&\s]*(token|key|secret|password|signature|credential)[^=&\s]*=", re.IGNORECASE
)
_OF_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)")


def secret_faults(config: Any) -> list[str]:
    """Options that hold a secret, which a run would write into its files; without the secrets themselves.

    Args:
        config: options as plain containers.
    """
    faults = []
    for path, value in _leaves(config):
        name = path.rpartition(".")[2]
        if path in TEXTS or not isinstance(value, str) or not value:
            continue
        if _SECRET_NAME.search(name):
            faults.append(
                f"{path}: a secret would be written into the files of the run; give it by an environment variable "
                "(WANDB_API_KEY, HF_TOKEN) instead"
            )
        elif _LOGIN_IN_URL.search(value) or _SECRET_IN_QUERY.search(value):
            faults.append(
                f"{path}: the address holds a login or a key, which would be written into the files of the run; leave "
                "it out, and put it into ~/.netrc, which is read for every address"
            )
        elif any(secret in value for secret in _secrets_of_environment()) or any(
            _SECRET_NAME.search(variable) for variable in _OF_ENVIRONMENT.findall(value)
        ):
            faults.append(f"{path}: holds the value of a secret environment variable, which the run would write down")
    return faults


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _leaves(value, path)
    else:
        yield path, node


def _secrets_of_environment() -> list[str]:
    return [
        secret
        for variable, secret in os.environ.items()
        if len(secret) >= _SHORTEST_SECRET and _SECRET_NAME.search(variable)
    ]


def public(value: Any, name: str = "") -> Any:
    """``value``, in plain containers, as it may leave this machine.

    Args:
        name: of the option that holds it; a value under a name that speaks of a secret (``password``, ``hf_token``,
            ``api_key``) is hidden unless it is null.
    """
    if isinstance(value, dict):
        return {key: public(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [public(inner, name) for inner in value]
    if value is not None and not isinstance(value, bool) and _SECRET_NAME.search(name):
        return HIDDEN
    return without_secrets(value) if isinstance(value, str) else value


def without_secrets(text: str) -> str:
    """``text`` without values of secret environment variables, logins and queries in URLs, and the home directory."""
    for secret in _secrets_of_environment():
        text = text.replace(secret, HIDDEN)
    option, equals, _ = text.partition("=")
    if equals and _SECRET_NAME.search(option.rsplit(".", 1)[-1]):
        text = f"{option}={HIDDEN}"
    text = _QUERY_IN_URL.sub(rf"\1?{HIDDEN}", _LOGIN_IN_URL.sub(rf"\1{HIDDEN}@", text))
    home = str(Path.home())
    return re.sub(rf"{re.escape(home)}(?=/|$)", "~", text) if home != "/" else text
