"""DVC: which stages an edit runs again, that a second `repro` does nothing, and what it survives."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PARTS = (".dvc/config", ".dvcignore", "dvc.yaml", "conf", "lib", "stages")
# Eight of the shipped pictures, in three buckets; the table below edits the first two.
PICTURES = ("fox", "elephant", "cupcake", "key", "avocado", "balloon", "owl-crown", "whale-key")
UP_TO_DATE = "Data and pipelines are up to date."
SECONDS = 240
CI = "conf/experiment/ci.yaml"

RESULTS = ["train", "export", "sample"]
STAGES = ["prepare_dataset", "encode_captions", "build_latent_cache", *RESULTS]

# `python` for DVC: asks a process that has the model libraries loaded already to run the command.
# Seven stages after each of a dozen edits would import them again and again, for minutes.
SERVER = """
import os, runpy, socket, sys
import hydra, matplotlib.figure, peft, torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel, T5EncoderModel

def serve(connection):
    place, *words = connection.makefile().readline().rstrip("\\n").split("\\t")
    pid = os.fork()
    if pid == 0:
        os.chdir(place)
        with open("commands.log", "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.path.insert(0, place)
        sys.argv = words
        code = 1
        try:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    connection.sendall(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    connection.close()

listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
while True:
    serve(listener.accept()[0])
"""
CLIENT = """\
#!{python} -IS
import os, socket, sys
assert sys.argv[1] == "-m"
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
server.sendall("\\t".join([os.getcwd(), *sys.argv[2:]]).encode() + b"\\n")
sys.exit(int(server.makefile().read()) % 256)
"""


class Copy:
    """A checkout of its own with a small data set, where DVC runs."""

    def __init__(self, root: Path, *, binaries: Path):
        self.root = root
        self._path = os.pathsep.join([str(binaries), os.environ["PATH"]])

    def file(self, name: str) -> Path:
        return self.root / name

    def edit(self, name: str, old: str, new: str) -> None:
        text = self.file(name).read_text(encoding="utf-8")
        assert text.count(old) == 1, (name, old)
        self.file(name).write_text(text.replace(old, new), encoding="utf-8")

    def add(self, name: str, line: str) -> None:
        with self.file(name).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def environment(self) -> dict[str, str]:
        places = {"DVC_SITE_CACHE_DIR": str(self.root.parent / "dvc"), "PATH": self._path}
        return {**os.environ, **places}

    def dvc(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dvc", *words]
        return subprocess.run(
            command,
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def repro(self, *words: str) -> list[str]:
        """The stages that ran."""
        done = self.dvc("repro", *words)
        log = self.file("commands.log")
        assert done.returncode == 0, (done.stdout, done.stderr, log.exists() and log.read_text())
        starts = [line for line in done.stdout.splitlines() if line.startswith("> ")]
        return [line.split()[-1] for line in starts]

    def contents(self) -> dict[str, tuple[str, int]]:
        """The digest and time of each file of the store and the outputs."""
        files = [p for top in ("store", "outputs") for p in self.file(top).rglob("*")]
        return {
            str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
            for path in files
            if path.is_file()
        }

    def pointers(self) -> dict[str, bytes]:
        """What DVC compares, by name."""
        return {path.name: path.read_bytes() for path in self.file("outputs/dvc").glob("*.*")}

    def verify(self) -> int:
        """The exit code of `stages.store verify`."""
        command = [self._path.split(os.pathsep)[0] + "/python", "-m", "stages.store", "verify"]
        return subprocess.run(command, cwd=self.root, timeout=SECONDS).returncode


@pytest.fixture(scope="session")
def binaries(tmp_path_factory):
    """A folder with the `python` that DVC finds."""
    folder = tmp_path_factory.mktemp("bin")
    address = folder / "server"
    python = folder / "python"
    python.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    python.chmod(0o755)
    server = subprocess.Popen([sys.executable, "-W", "ignore", "-c", SERVER, str(address)])
    deadline = time.monotonic() + SECONDS
    while not address.exists():
        assert server.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield folder
    server.kill()
    server.wait()


@pytest.fixture
def copy(tmp_path, binaries):
    """A checkout in which nothing was made yet."""
    root = tmp_path / "checkout"
    for name in PARTS:
        source, target = CHECKOUT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    data = root / "examples" / "emoji"
    data.mkdir(parents=True)
    for name in PICTURES:
        shutil.copy(CHECKOUT / "examples" / "emoji" / f"{name}.png", data)
        (data / f"{name}.txt").write_text(f"a 3D emoji of {name}", encoding="utf-8")
    made = Copy(root, binaries=binaries)
    made.edit(CI, "max_steps: 20", "max_steps: 4")
    made.edit(CI, "  steps: 4", "  steps: 1")
    return made


def another_picture(copy: Copy) -> None:
    shutil.copy(CHECKOUT / "examples/emoji/rocket.png", copy.file("examples/emoji/elephant.png"))


def edit(name: str, old: str, new: str):
    return lambda copy: copy.edit(name, old, new)


def append(name: str, line: str):
    return lambda copy: copy.add(name, line)


EDITS = {
    "a caption": (
        edit("examples/emoji/fox.txt", "a 3D emoji of fox", "a red fox"),
        ["prepare_dataset", "encode_captions", *RESULTS],
    ),
    "a picture": (another_picture, ["prepare_dataset", "build_latent_cache", *RESULTS]),
    "the learning rate": (
        edit("conf/optimizer/adamw.yaml", "${family.preset.lr}", "2.0e-4"),
        ["compose", *RESULTS],
    ),
    "the resolution": (
        edit(CI, "resolution: 64", "resolution: 80"),
        ["compose", "prepare_dataset", "build_latent_cache", *RESULTS],
    ),
    "the default of a group": (
        edit("conf/config.yaml", "timesteps: logit_normal", "timesteps: uniform"),
        ["compose", *RESULTS],
    ),
    "an option that is not chosen": (
        edit("conf/lr_schedule/polynomial.yaml", "power: 2.0", "power: 3.0"),
        ["compose"],
    ),
    "a comment": (append("conf/optimizer/adamw.yaml", "# why not"), ["compose"]),
    "a lever": (edit(CI, "save_every: 10", "save_every: 5"), ["compose"]),
    # Its record may be needed anew, so train looks; it finds its run and changes no pointer.
    "a prompt": (
        edit(CI, "sample:\n", "sample:\n  prompts: [a red apple]\n"),
        ["compose", "encode_captions", "train", "sample"],
    ),
    "the type of the export": (
        edit("conf/export/diffusers.yaml", "dtype: fp32", "dtype: bf16"),
        ["compose", "export", "sample"],
    ),
    "a module of training": (append("lib/objectives.py", "# why not"), ["train"]),
    "a text beside the pictures": (append("examples/emoji/README.md", "more"), []),
}


@pytest.mark.slow
def test_an_edit_runs_the_stages_that_it_concerns_and_no_other(copy):
    assert sorted(copy.repro()) == sorted(["compose", *STAGES])
    before = copy.contents()
    done = copy.dvc("repro")
    assert done.stdout.splitlines()[-1] == UP_TO_DATE
    assert copy.contents() == before
    ran = {}
    for name, (change, _) in EDITS.items():
        change(copy)
        ran[name] = sorted(copy.repro())
    assert ran == {name: sorted(expected) for name, (_, expected) in EDITS.items()}
    assert copy.dvc("repro").stdout.splitlines()[-1] == UP_TO_DATE
    assert copy.verify() == 0
    shown = json.loads(copy.dvc("metrics", "show", "--json").stdout)
    metrics = shown[""]["data"]["outputs/dvc/metrics.json"]["data"]
    assert metrics["steps"] == 4
    assert "dvc_plots" in copy.dvc("plots", "show").stdout
    plots = json.loads(copy.dvc("plots", "show", "--json").stdout)["data"]
    values = plots["outputs/dvc/loss.csv"][0]["content"]["data"]["values"]
    assert [value["step"] for value in values] == ["1", "2", "3", "4"]


@pytest.mark.slow
def test_what_is_lost_is_reported_or_made_again_and_no_pointer_comes_back_alone(copy):
    copy.repro()
    pointers = copy.pointers()
    entry = sorted(copy.file("store/latents").glob("*/*.safetensors"))[0]
    entry.unlink()
    assert copy.verify() == 3
    copy.file("outputs/dvc/build_latent_cache.json").unlink()
    assert copy.repro() == ["build_latent_cache"]
    assert entry.is_file()
    assert copy.verify() == 0
    shutil.rmtree(copy.file("store"))
    assert sorted(copy.repro()) == sorted(STAGES)
    assert entry.is_file()
    assert copy.verify() == 0
    assert copy.pointers() == pointers


@pytest.mark.slow
def test_a_killed_train_stage_resumes_at_the_next_repro(copy):
    copy.edit(CI, "max_steps: 4", "max_steps: 200")
    copy.repro("build_latent_cache", "encode_captions")
    command = [sys.executable, "-m", "dvc", "repro", "train"]
    running = subprocess.Popen(
        command,
        cwd=copy.root,
        env=copy.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + SECONDS
    while not list(copy.root.glob("outputs/*/checkpoints/step-*")):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (record,) = (p for p in copy.root.glob("store/runs/*.json") if len(p.stem) == 64)
    os.kill(json.loads(record.read_text())["process"]["pid"], signal.SIGKILL)
    _, errors = running.communicate(timeout=SECONDS)
    assert running.returncode != 0
    assert b"failed to reproduce 'train'" in errors
    assert not copy.file("outputs/dvc/train.json").exists()
    assert copy.repro("train") == ["train"]
    (events,) = copy.root.glob("outputs/*/events.jsonl")
    decisions = [json.loads(line) for line in events.read_text().splitlines()]
    resumed = [e["value"] for e in decisions if e["kind"] == "decision" and e["name"] == "resume"]
    assert len(resumed) == 1
    assert resumed[0] > 0
    rows = copy.file("outputs/dvc/loss.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(1, 201))]


@pytest.mark.slow
def test_pointers_are_the_same_bytes_in_another_place(ensure, configure, tmp_path):
    from lib.events import Events
    from lib.pipeline import graph, pointers

    found = []
    for name in ("here", "there"):
        config = configure(root=tmp_path / name)
        for stage in graph.STAGES:
            pointers.publish(ensure(stage, root=tmp_path / name), config, Events())
        files = sorted((tmp_path / name / "outputs" / "dvc").glob("*.*"))
        found.append({path.name: path.read_bytes() for path in files})
    assert found[0] == found[1]
    assert {f"{stage}.json" for stage in graph.STAGES} < found[0].keys()
    assert not [name for name, data in found[0].items() if str(tmp_path).encode() in data]


def test_gc_keeps_what_pointers_point_to_for_as_long_as_they_are_there(ensure, configure, tmp_path):
    from lib.events import Events
    from lib.pipeline import pointers
    from lib.store import Store
    from lib.upkeep import gc

    def collect():
        gc(store, keep_days=0, now=time.time() + 60, grace_seconds=0, dry_run=False)

    store, manifest = Store(tmp_path / "store"), ensure("build_latent_cache")
    pointers.publish(manifest, configure(), Events())
    collect()
    assert store.manifest(manifest.stage, manifest.key) == manifest
    assert store.complete(manifest) == ()
    shutil.rmtree(tmp_path / "outputs" / "dvc")
    collect()
    assert store.manifest(manifest.stage, manifest.key) is None
    assert len(store.complete(manifest)) == len(manifest.entries["train"])


def test_a_stage_is_refused_when_its_settings_are_not_those_that_dvc_saw(configure):
    from lib.errors import StateRefused
    from lib.pipeline import pointers

    with pytest.raises(StateRefused, match="dvc repro"):
        pointers.check_settings("train", configure())
    pointers.write_settings(configure())
    pointers.check_settings("train", configure("trainer.save_every=1"))
    pointers.check_settings("encode_captions", configure("optimizer.lr=1"))
    with pytest.raises(StateRefused, match=r"train\.json"):
        pointers.check_settings("train", configure("optimizer.lr=1"))


TEXTS = {
    "captions.dtype": "bf16",
    "latents.dtype": "bf16",
    "precision.mode": "bf16",
    "export.format": "another",
    "export.dtype": "bf16",
    "timesteps.density": "uniform",
    "optimizer.name": "another",
    "lr_schedule.name": "cosine",
    "sample.negative_prompt": "blurred",
}


def changed(config, setting: str):
    """The configuration with another value of one setting, as it would be without any rule."""
    from lib.schema import value_of

    *groups, name = setting.split(".")
    value = value_of(config, setting)
    if setting in TEXTS:
        other = TEXTS[setting]
    elif isinstance(value, bool):
        other = not value
    elif isinstance(value, list):
        other = [*value, "more"]
    else:
        other = value * 2 if value else type(value)(1)
    node = replace(value_of(config, ".".join(groups)) if groups else config, **{name: other})
    return replace(config, **{groups[0]: node}) if groups else node


def test_no_setting_enters_a_key_without_its_stage_or_one_upstream_showing_it_to_dvc(
    ensure, configure
):
    """Whatever moves a planned key moves the settings of that stage, or of one before it."""
    from lib.pipeline import graph
    from lib.schema import settings_of

    def seen(config):
        plans = {p.stage: p.manifest for p in graph.plan("sample", config)}
        keys = {stage: manifest and manifest.key for stage, manifest in plans.items()}
        shown = {stage: module.key_settings(config) for stage, (module, _) in graph.STAGES.items()}
        return keys, shown

    config = configure()
    ensure("prepare_dataset")
    keys, shown = seen(config)
    moved = set()
    for setting, value in settings_of(config):
        free_text = isinstance(value, str | None) and setting not in TEXTS
        if free_text or setting.startswith("family."):
            continue
        new_keys, new_shown = seen(changed(config, setting))
        for stage in graph.STAGES:
            if new_keys[stage] != keys[stage]:
                moved.add(setting)
                assert any(new_shown[s] != shown[s] for s in graph.order(stage)), (setting, stage)
    assert {"optimizer.lr", "buckets.step", "captions.max_length", "export.dtype"} <= moved
    assert not {"trainer.save_every", "encode.batch_size", "latents.max_bytes"} & moved
