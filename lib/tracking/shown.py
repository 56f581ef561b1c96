"""What of a run may be shown in MLflow: no caption, no token, no path of this machine."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lib.files import user_path
from lib.schema import CAPTION_TEXTS

MAX_CHARS = 250
_LEFT_OUT = ("paths", "tracker")
_FOLDERS = ("dataset.root", "family.base")
_PATH = re.compile(r"""(?<![\w.:/-])~?/(?:[^\s/,;:'"()\[\]]+/)*([^\s/,;:'"()\[\]]+)/?""")
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIAL")
_SECRET_CHARS = 8


def shown_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without this machine's folders, secrets and texts of captions."""
    groups = {name: value for name, value in values.items() if name not in _LEFT_OUT}
    return {name: _shown(name, value) for name, value in groups.items()}


def parameters(values: Mapping[str, Any]) -> dict[str, str]:
    """Every setting by its dotted name, cut to what a parameter holds; prompts are left out."""
    flat = _flat(shown_config(values))
    left_out = ("sample.prompts", "sample.negative_prompt", *CAPTION_TEXTS)
    return {name: cut(_as_text(value)) for name, value in flat if name not in left_out}


def scrubbed(text: str) -> str:
    """A text in which secrets of the environment are hidden and paths are their last names."""
    for name, value in os.environ.items():
        if len(value) >= _SECRET_CHARS and _SECRET.search(name.upper()):
            text = text.replace(value, "[hidden]")
    return _PATH.sub(r"\1", text)


def cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 3]}..."


def plain_name(name: str) -> str:
    """A name that every MLflow takes."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:MAX_CHARS]


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shown(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(name, item) for item in value]
    if isinstance(value, str):
        if name in CAPTION_TEXTS:
            return "[not shown]"
        return scrubbed(_last_name(value) if name in _FOLDERS else value)
    return value


def _last_name(text: str) -> str:
    """The last name of a folder; a Hub id stays whole."""
    path = user_path(text)
    is_path = path.is_absolute() or text.startswith(".") or path.is_dir()
    return Path(os.path.abspath(path)).name if is_path else text


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
