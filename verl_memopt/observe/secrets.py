"""Recognises secrets by the name of an entry and by the shape of a text, and replaces them.

The settings, checkpoints, commands and logs of a run have a checksum in place of each secret, so equal secrets stay equal.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "hidden:"

OPEN_KEYS = (
    *("custom_reward_function.reward_kwargs", "ray_kwargs.ray_init", "actor_rollout_ref.rollout.engine_kwargs.vllm"),
    "data.apply_chat_template_kwargs",
)
"""Keys below which the user chooses the names of the entries. Some of these entries are secrets."""

_WORDS = (
    r"passw(?:or)?d?s?|pwd|passphrases?|passcode|secrets?|credentials?|cookies?|bearer|auth|authorization|"
    r"(?:api|access|private|secret|signing|encryption|account|subscription|ssh|session)[_-]?keys?|apikeys?"
)
_BEFORE = r"(?:[\w-]*[_.-])?"
_NAME = re.compile(rf"{_BEFORE}(?:{_WORDS})(?:[_-](?:value|text|string|header|id))?", re.I)
# Names of a secret if the value is a text. A number under such a name is a count or an index.
_NAME_OF_TEXT = re.compile(rf"(?:{_BEFORE}tokens?|keys?)", re.I)
_NO_SECRET = re.compile(r"(?:bos|eos|pad|unk|sep|cls|mask|stop|image|video|audio|end|start|special|max|min|num)_tokens?", re.I)

_SHAPES = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]*://)(?P<user>[^\s/@:'\"]*:[^\s/@'\"]+|[^\s/@:'\"]{16,})(?=@)"
    r"|(?<=[?&])(?P<query>(?:api_?key|access_?token|token|sig|signature|secret|password|key)=)(?P<value>[^&\s'\"]{4,})"
    r"|(?<![\w/.-])(?:hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]*\d)[\w-]{16,}|gh[oprsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|dckr_pat_[\w-]{16,}|pypi-[\w-]{32,}|npm_\w{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|(?<=Bearer )[\w.~+/-]{12,}=*|(?<=Basic )[\w+/]{12,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.S,
)
"""Credentials in a URL, secret parameters of a URL, tokens of well-known services, HTTP credentials and private keys."""


def is_secret_name(name: str, value: Any = "") -> bool:
    # Whether an entry of this name is a secret. Some names count only if the value is a text.
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name))
    if _NAME.fullmatch(snake):
        return True
    return bool(_NAME_OF_TEXT.fullmatch(snake)) and not _NO_SECRET.fullmatch(snake) and _has_text(value)


def _has_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_text, value.values()))
    return any(map(_has_text, value)) if isinstance(value, list | tuple) else isinstance(value, str)


def hide_shapes(text: str) -> str:
    # What surrounds a secret, such as the host in a URL, stays readable.
    def hidden(found: re.Match[str]) -> str:
        for kept, secret in (("before", "user"), ("query", "value")):
            if found[kept] is not None:
                return found[kept] + hide(found[secret])
        return hide(found[0])

    return _SHAPES.sub(hidden, text)


def hide(secret: str) -> str:
    # Hiding twice changes nothing.
    return (
        secret if secret.startswith(HIDDEN) else f"{HIDDEN}{hashlib.sha256(secret.encode('utf-8', 'replace')).hexdigest()[:16]}"
    )


def without_secrets(value: Any, open_key: bool = True) -> Any:
    """Return a value of the settings with a checksum in place of each secret in it.

    ``open_key``: the user chose the names of the entries, so a name can mark its entry as a secret.
    """
    if isinstance(value, Mapping):
        return {
            name: _all_hidden(entry) if open_key and is_secret_name(name, entry) else without_secrets(entry, open_key)
            for name, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(entry, open_key) for entry in value]
    return hide_shapes(value) if isinstance(value, str) else value


def without_secrets_of(key: str, value: Any) -> Any:
    """Return the value of a key with a checksum in place of each secret. Names count only below the keys in ``OPEN_KEYS``."""
    section = next((name for name in OPEN_KEYS if key == name or key.startswith(f"{name}.")), None)
    if section is None:
        return without_secrets(value, open_key=False)
    *_, name = key.split(".")
    return _all_hidden(value) if key != section and is_secret_name(name, value) else without_secrets(value)


def _all_hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _all_hidden(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_all_hidden(entry) for entry in value]
    return value if value is None or isinstance(value, bool) else hide(str(value))


_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_INSIDE = rf"(?:{_QUOTED}|[^{{}}\[\]'\"])*"
_ARGUMENT = re.compile(rf"(?<![\w.-])([\w.-]+)([\"']?\s*[=:]\s*)({_QUOTED}|\[{_INSIDE}\]|\{{{_INSIDE}\}}|[^,{{}}\[\]]+)")


def argument_without_secrets(argument: str) -> str:
    def hidden(found: re.Match[str]) -> str:
        name, sign, value = found.groups()
        bare = value.strip(" \"'")
        if is_secret_name(name.rpartition(".")[2], 0 if re.fullmatch(r"[-+.\d]+", bare) else bare):
            return f"{name}{sign}{hide(bare)}"
        return f"{name}{sign}{_ARGUMENT.sub(hidden, value) if value[0] in '[{' else value}"

    if any(key in argument for key in OPEN_KEYS):
        key, sign, value = argument.partition("=")
        if sign and is_secret_name(key.rpartition(".")[2], value):
            argument = f"{key}={hide(value.strip(chr(34) + chr(39)))}"
        elif sign:
            argument = f"{key}={_ARGUMENT.sub(hidden, value)}"
    return hide_shapes(argument)


def secrets_in(function: Any, pickled: bytes) -> list[str]:
    """Return the names of secrets that a pickled function contains, for a warning. ``pickled``: its bytes."""
    code, named = getattr(function, "__code__", None), dict(getattr(function, "__kwdefaults__", None) or {})
    for name, cell in zip(getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=False):
        try:
            named[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    arguments = code.co_varnames[: code.co_argcount] if code is not None else ()
    defaults = getattr(function, "__defaults__", None) or ()
    named |= dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=False))
    named |= dict(getattr(function, "keywords", None) or {})
    named |= vars(function) if hasattr(function, "__dict__") else {}
    if getattr(function, "__module__", None) == "__main__" and code is not None:  # its globals are pickled with it
        global_names = getattr(function, "__globals__", {})
        named |= {name: global_names[name] for name in code.co_names if name in global_names}
    found = [name for name, value in named.items() if _has_text(value) and (is_secret_name(name, value) or _differs(value))]
    if not found and hide_shapes(text := pickled.decode("latin-1")) != text:
        found = ["a text in it"]
    return sorted(found)


def _differs(value: Any) -> bool:
    return without_secrets(value) != (list(value) if isinstance(value, tuple) else value)
