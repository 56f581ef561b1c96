"""What Hydra composes of the files of conf/ alone is made once per process, not at every command.

The choices of options are composed as ever, each the first time that it is met; Hydra itself then
puts the values that were given into a copy. A folder that a test may change is composed every time.
"""

import copy
import dataclasses

from hydra._internal import config_loader_impl
from hydra.core.config_store import ConfigStore

from stages import composing

CONF = f"file://{composing.CONF}"
SCHEMA = "schema.yaml"
Loader = config_loader_impl.ConfigLoaderImpl
_register = composing.register
_list = config_loader_impl.create_defaults_list
_compose = Loader._compose_config_from_defaults_list
_schemas, _lists, _contents = {}, {}, {}


def install(put=setattr):
    """From here on in this process."""
    put(composing, "register", _register_once)
    put(config_loader_impl, "create_defaults_list", _list_once)
    put(Loader, "_compose_config_from_defaults_list", _compose_once)


def withdraw(put):
    """Compose as a command does."""
    put(composing, "register", _register)
    put(config_loader_impl, "create_defaults_list", _list)
    put(Loader, "_compose_config_from_defaults_list", _compose)


def _register_once(*, typed):
    """The schema, which Hydra copies whenever it reads it."""
    stored = ConfigStore.instance().repo
    if typed not in _schemas:
        _register(typed=typed)
        _schemas[typed] = stored[SCHEMA]
    stored[SCHEMA] = _schemas[typed]


def _list_once(repo, config_name, overrides_list, prepend_hydra, skip_missing):
    """Which files make a configuration: it depends on the options, and on no value."""
    schema = ConfigStore.instance().repo.get(SCHEMA)
    sources = tuple(source.full_path() for source in repo.get_sources())
    if CONF not in sources or not any(schema is ours for ours in _schemas.values()):
        return _list(repo, config_name, overrides_list, prepend_hydra, skip_missing)
    values, choices = [], []
    for override in overrides_list:
        (values if _is_value(override, repo) else choices).append(override)
    words = tuple(choice.input_line for choice in choices)
    key = (id(schema), sources, config_name, words, prepend_hydra, skip_missing)
    if key not in _lists:
        _lists[key] = _list(repo, config_name, choices, prepend_hydra, skip_missing)
    return dataclasses.replace(_lists[key], config_overrides=values)


def _is_value(override, repo):
    """As Hydra tells a value from the choice of an option."""
    if override.is_sweep_override():
        return False
    return isinstance(override.value(), dict) or not repo.group_exists(override.key_or_group)


def _compose_once(loader, defaults, repo):
    """What the files hold, before any value is put into it."""
    if not any(defaults is kept.defaults for kept in _lists.values()):
        return _compose(loader, defaults=defaults, repo=repo)
    if id(defaults) not in _contents:
        _contents[id(defaults)] = _compose(loader, defaults=defaults, repo=repo)
    return copy.deepcopy(_contents[id(defaults)])
