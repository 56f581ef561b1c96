"""What may be shown: no path, no credentials; and who pays for MLflow."""

import subprocess
import sys
from pathlib import Path

import pytest

from lib.errors import without_credentials
from lib.tracking.journal import TrackerFailed
from lib.tracking.server import Server, prepare_environment
from lib.tracking.shown import parameters, scrubbed, shown_config

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/base", "base"),
        ("at ~/x/y.png, 3", "at y.png, 3"),
        ("['/a/b', '/c']", "['b', 'c']"),
        ("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-dev"),
        ("http://host:1/api/x", "http://host:1/api/x"),
        ("1/3 and/or 2", "1/3 and/or 2"),
    ],
)
def test_paths_are_their_last_names(text, shown):
    assert scrubbed(text) == shown


@pytest.mark.parametrize("name", ["instance_prompt", "trigger", "prefix"])
def test_what_becomes_part_of_a_caption_is_not_shown(name):
    values = {"dataset": {name: "a pink walrus", "min_side": 3}}
    assert parameters(values) == {"dataset.min_side": "3"}
    assert "walrus" not in str(shown_config(values))
    assert shown_config({"dataset": {name: None}}) == {"dataset": {name: None}}


def test_an_address_is_shown_without_its_credentials():
    assert without_credentials("http://a:b@host:5/x") == "http://host:5/x"
    assert without_credentials("sqlite:////a/b.db") == "sqlite:////a/b.db"


@pytest.mark.parametrize("store", ["sqlite:////proc/none/mlflow.db", "http://me:pass@127.0.0.1:1"])
def test_a_store_that_fails_is_named_without_credentials(store):
    prepare_environment()
    with pytest.raises(TrackerFailed) as failed:
        Server(store, "darkroom")
    assert "me:pass" not in str(failed.value)
    assert without_credentials(store) in str(failed.value)


def test_the_tracker_is_imported_without_mlflow():
    code = """
import sys, lib.tracking, lib.pipeline.train
print([name for name in ("mlflow", "sqlalchemy", "torch") if name in sys.modules])"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
