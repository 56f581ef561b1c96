"""Secrets and captions: planted in the environment, the configuration and the data, found nowhere."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
SECONDS = 400
NAMES = ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY")
SECRETS = {name: f"canary-{number}-{'z9' * 12}" for number, name in enumerate(NAMES)}
LOGIN = "canary-login-q7w8e9r0"
CAPTION = "a canary caption of a pink walrus"
SMALL = (
    "+experiment=ci",
    "trainer.max_steps=2",
    "adapter.rank=2",
    "sample.steps=1",
    "dataset.root=data",
    "paths.store=store",
    "paths.outputs=outputs",
    "name=mine",
)


@pytest.fixture
def place(tmp_path):
    """A folder with a few pictures; the first one's caption is the canary."""
    data = tmp_path / "data"
    data.mkdir()
    for name in ("fox", "pizza", "owl-crown", "whale-key"):
        shutil.copy(CHECKOUT / "examples" / "emoji" / f"{name}.png", data)
        text = CAPTION if name == "fox" else f"a 3D emoji of {name}"
        (data / f"{name}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def run(place, stage, *words):
    """A whole command with every secret in its environment; code and output."""
    added = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", **SECRETS}
    done = subprocess.run(
        [sys.executable, "-m", f"stages.{stage}", *SMALL, *words],
        cwd=place,
        env={**os.environ, **added},
        capture_output=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout + done.stderr


def holding(place, words):
    """The files outside the data set in which one of the words stands, in any of a few forms."""
    forms = [word.encode(code) for word in words for code in ("utf-8", "utf-16-le")]
    forms += [json.dumps(word)[1:-1].encode() for word in words]
    files = [path for path in place.rglob("*") if path.is_file()]
    named = {path.relative_to(place).as_posix(): path.read_bytes() for path in files}
    assert len(named) > 20
    found = {name for name, data in named.items() if any(form in data for form in forms)}
    return {name for name in found if not name.startswith("data/")}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


TRACKERS = {
    "none": lambda place: ["tracker=none"],
    "sqlite": lambda place: [
        "tracker=mlflow",
        f"tracker.uri=sqlite:///{place}/mlflow.db",
    ],
    "closed port": lambda place: [
        "tracker=mlflow",
        f"tracker.uri=http://me:{LOGIN}@127.0.0.1:{free_port()}",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "tracker",
    [
        pytest.param("none", marks=pytest.mark.nightly),
        "sqlite",
        pytest.param("closed port", marks=pytest.mark.nightly),
    ],
)
def test_no_secret_is_in_anything_that_the_whole_graph_leaves_or_says(place, tracker):
    code, said = run(place, "sample", *TRACKERS[tracker](place))
    assert code == 0, said.decode()
    assert (place / "mlflow.db").exists() == (tracker == "sqlite")
    words = [*SECRETS.values(), LOGIN]
    assert holding(place, words) == set()
    assert not [word for word in words if word.encode() in said]
    # Manifests list what a data set holds; a caption's own entry says which text it is of.
    kept = {Path(name).parts[:2] for name in holding(place, [CAPTION])}
    assert kept == {("store", "manifests"), ("store", "captions")}
    assert CAPTION.encode() not in said


@pytest.mark.nightly
def test_no_secret_is_in_what_a_sweep_leaves_or_says(place):
    address = f"tracker.uri=http://me:{LOGIN}@127.0.0.1:{free_port()}"
    code, said = run(place, "train", "-m", "seed=1,2", "tracker=mlflow", address)
    assert code == 0, said.decode()
    assert holding(place, [*SECRETS.values(), LOGIN]) == set()
    assert LOGIN.encode() not in said
    assert b"job 1" in said


@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(["-m", "seed=1,2"], marks=pytest.mark.nightly),
        pytest.param(["--cfg", "job"], marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_no_secret_is_in_a_refusal(place, flags):
    words = [
        f"tracker.uri=http://me:{LOGIN}@127.0.0.1",
        f"+tracker.url=http://me:{LOGIN}@127.0.0.1",
        "dataset.instance_prompt='${oc.env:HF_TOKEN}'",
        "sample.prompts=['${oc.env:WANDB_API_KEY}']",
    ]
    code, said = run(place, "train", *flags, *words)
    assert code == 2, said.decode()
    assert not [word for word in (*SECRETS.values(), LOGIN) if word.encode() in said]
    assert sorted(path.name for path in place.iterdir()) == ["data"]


def test_what_is_searched_for_would_be_found(place):
    for number in range(20):
        (place / f"{number}.json").write_text(json.dumps({"text": CAPTION}))
    (place / "x.bin").write_bytes(b"\x00" + LOGIN.encode("utf-16-le"))
    assert len(holding(place, [CAPTION])) == 20
    assert holding(place, [LOGIN]) == {"x.bin"}
