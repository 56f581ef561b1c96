"""DVC: which stages an edit runs again, that a second `repro` does nothing, and what it survives."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PARTS = (".dvc/config", ".dvcignore", "dvc.yaml", "conf", "lib", "stages")
# Eight of the shipped pictures, in three buckets; the table below edits the first two.
PICTURES = ("fox", "elephant", "cupcake", "key", "avocado", "balloon", "owl-crown", "whale-key")
SERVER = Path(__file__).with_name("warm_server.py")
UP_TO_DATE = "Data and pipelines are up to date."
SECONDS = 240
CI = "conf/experiment/ci.yaml"

RESULTS = ["train", "export", "sample"]
STAGES = ["prepare_dataset", "encode_captions", "build_latent_cache", *RESULTS]

# `python` for DVC and for most tests: asks a process that has the libraries loaded already.
CLIENT = """\
#!{python} -IS
import os, socket, sys
assert sys.argv[1] == "-m"
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
words = [os.getcwd(), os.environ.get("OUTPUT", "commands.log"), *sys.argv[2:]]
server.sendall("\\t".join(words).encode() + b"\\n")
sys.exit(int(server.makefile().read()) % 256)
"""


class Copy:
    """A checkout of its own with a small data set, where DVC runs."""

    def __init__(self, root: Path, *, environment: dict[str, str]):
        self.root = root
        self.environment = environment

    def file(self, name: str) -> Path:
        return self.root / name

    def edit(self, name: str, old: str, new: str) -> None:
        text = self.file(name).read_text(encoding="utf-8")
        assert text.count(old) == 1, (name, old)
        self.file(name).write_text(text.replace(old, new), encoding="utf-8")

    def add(self, name: str, line: str) -> None:
        with self.file(name).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def python(self, *words: str) -> tuple[int, str]:
        """The exit code and the output of `python -m`."""
        output = self.file("output")
        output.unlink(missing_ok=True)
        done = subprocess.run(
            ["python", "-m", *words],
            cwd=self.root,
            env={**self.environment, "OUTPUT": output.name},
            timeout=SECONDS,
        )
        return done.returncode, output.read_text(encoding="utf-8")

    def output(self, *words: str) -> str:
        """What `dvc` prints."""
        command = [sys.executable, "-m", "dvc", *words]
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        log = self.file("commands.log")
        assert done.returncode == 0, (done.stdout, done.stderr, log.exists() and log.read_text())
        return done.stdout

    def repro(self, *words: str) -> list[str]:
        """The stages that ran."""
        lines = self.output("repro", *words).splitlines()
        return [line.split()[-1] for line in lines if line.startswith("> ")]

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
        return self.python("stages.store", "verify")[0]


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """An environment in which `python` is quick, and DVC has folders of its own."""
    folder = tmp_path_factory.mktemp("bin")
    address, python = folder / "server", folder / "python"
    python.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    python.chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    made = {**os.environ, "PATH": path, "DVC_SITE_CACHE_DIR": str(folder / "dvc")}
    command = [sys.executable, "-W", "ignore", str(SERVER), str(address)]
    server = subprocess.Popen(command, env=made)
    deadline = time.monotonic() + SECONDS
    while not address.exists():
        assert server.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield made
    server.kill()
    server.wait()


@pytest.fixture
def copy(tmp_path, environment):
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
    made = Copy(root, environment=environment)
    made.edit(CI, "max_steps: 20", "max_steps: 4")
    made.edit(CI, "  steps: 4", "  steps: 1\n  prompts: [a red fox]")
    return made


def another_picture(copy: Copy) -> None:
    shutil.copy(CHECKOUT / "examples/emoji/rocket.png", copy.file("examples/emoji/elephant.png"))


def edit(name: str, old: str, new: str):
    return lambda copy: copy.edit(name, old, new)


def append(name: str, line: str):
    return lambda copy: copy.add(name, line)


def several(*changes):
    """Edits of which none runs what another runs: one `repro` shows it of all."""
    return lambda copy: [change(copy) for change in changes]


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
        edit("conf/config.yaml", "timesteps: preset", "timesteps: uniform"),
        ["compose", *RESULTS],
    ),
    "an option that is not chosen, a comment, a lever": (
        several(
            edit("conf/lr_schedule/polynomial.yaml", "power: 2.0", "power: 3.0"),
            append("conf/optimizer/adamw.yaml", "# why not"),
            edit(CI, "save_every: 10", "save_every: 5"),
        ),
        ["compose"],
    ),
    # Its record may be needed anew, so train looks; it finds its run and changes no pointer.
    "a prompt": (
        edit(CI, "prompts: [a red fox]", "prompts: [a red apple]"),
        ["compose", "encode_captions", "train", "sample"],
    ),
    "the type of the export": (
        edit("conf/export/diffusers.yaml", "dtype: fp32", "dtype: bf16"),
        ["compose", "export", "sample"],
    ),
    "a module of training, a text beside the pictures": (
        several(
            append("lib/objectives.py", "# why not"),
            append("examples/emoji/README.md", "more"),
        ),
        ["train"],
    ),
}


@pytest.mark.nightly
def test_an_edit_runs_the_stages_that_it_concerns_and_no_other(copy):
    assert sorted(copy.repro()) == sorted(["compose", *STAGES])
    before = copy.contents()
    assert copy.output("repro").splitlines()[-1] == UP_TO_DATE
    assert copy.contents() == before
    ran = {}
    for name, (change, _) in EDITS.items():
        change(copy)
        ran[name] = sorted(copy.repro())
    assert ran == {name: sorted(expected) for name, (_, expected) in EDITS.items()}
    assert copy.repro() == []
    assert copy.verify() == 0
    shown = json.loads(copy.output("metrics", "show", "--json"))
    metrics = shown[""]["data"]["outputs/dvc/metrics.json"]["data"]
    assert metrics["steps"] == 4
    assert "dvc_plots" in copy.output("plots", "show")
    plots = json.loads(copy.output("plots", "show", "--json"))["data"]
    values = plots["outputs/dvc/loss.csv"][0]["content"]["data"]["values"]
    assert [value["step"] for value in values] == ["1", "2", "3", "4"]


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_killed_train_stage_resumes_at_the_next_repro(copy):
    copy.edit(CI, "max_steps: 4", "max_steps: 200")
    copy.repro("build_latent_cache", "encode_captions")
    command = [sys.executable, "-m", "dvc", "repro", "train"]
    running = subprocess.Popen(
        command,
        cwd=copy.root,
        env=copy.environment,
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
