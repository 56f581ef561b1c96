"""Files made to do harm: each is refused by name, at once, and nothing is executed or written."""

import os
import pickle
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from PIL import Image

from lib.manifest import Refusal, discover, inspect
from lib.schema import DatasetConfig
from tests.reliability.images import chunk, photo, png_of, saved

CHECKOUT = Path(__file__).resolve().parents[2]
MOST_BYTES = 300 << 20  # beside what the interpreter and the libraries take
LIMITED = """
import resource, sys
from pathlib import Path
from lib.manifest import Candidate, inspect
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + {most}, taken + {most}))
found = inspect(Candidate("a.png", Path(sys.argv[1]), ("x",)))
print(getattr(found, "kind", "accepted"), getattr(found, "problem", ""), sep="|")
"""

BOMB = zlib.compress(bytes(200 << 20), 9)  # 200 MB in 200 kB
PIXEL = chunk(b"IDAT", zlib.compress(bytes(9 * 8)))


class Canary:
    """What a pickle would do to whoever opens it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def webp_of(width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + (10).to_bytes(4, "little") + b"\x02\0\0\0" + sides
    return b"RIFF" + (len(body)).to_bytes(4, "little") + body


BOMBS = {
    "pixels in a PNG's header": (png_of(100_000, 100_000, PIXEL), "too many pixels"),
    "pixels at the format's limit": (png_of(2**31 - 1, 2**31 - 1, PIXEL), "too many pixels"),
    "23 kB of one bit": (saved(Image.new("1", (20_000, 9500)), "PNG"), "too many pixels"),
    "pixels in a WebP's header": (webp_of(16_384, 16_384), "too many pixels"),
    "pixels in a JPEG's header": (
        saved(photo(), "JPEG").replace(b"\0\x18\0\x28\x03", b"\xff\xff\xff\xff\x03", 1),
        "too many pixels",
    ),
    "zTXt": (png_of(8, 8, chunk(b"zTXt", b"a\0\0" + BOMB), PIXEL), "not a format that is read"),
    "iTXt": (
        png_of(8, 8, chunk(b"iTXt", b"a\0\x01\0\0\0" + BOMB), PIXEL),
        "not a format that is read",
    ),
    "iCCP": (png_of(8, 8, chunk(b"iCCP", b"a\0\0" + BOMB), PIXEL), "not a format that is read"),
    "JPEG scans": (saved(photo(), "JPEG") + b"\xff\xda" * 100_000, "damaged"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_by_its_header_in_little_memory(tmp_path, name):
    data, kind = BOMBS[name]
    (tmp_path / "a.png").write_bytes(data)
    code = LIMITED.format(most=MOST_BYTES)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "a.png")],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found, _, problem = run.stdout.partition("|")
    assert (found, run.stderr) == (kind, "")
    assert problem.startswith("a.png: ")


def test_more_data_than_the_header_tells_is_not_unpacked_without_end(tmp_path):
    data = png_of(8, 8, chunk(b"IDAT", BOMB))
    (tmp_path / "a.png").write_bytes(data)
    run = subprocess.run(
        [sys.executable, "-c", LIMITED.format(most=MOST_BYTES), str(tmp_path / "a.png")],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, "")


def refused(root: Path, **options: object) -> dict[str, str]:
    """Every problem of a folder by its subject."""
    chosen = DatasetConfig(str(root), "x", **options)
    found = discover(root, options=chosen)
    read = [inspect(candidate) for candidate in found.candidates]
    problems = [*found.problems, *(one.problem for one in read if isinstance(one, Refusal))]
    return {problem.subject: problem.why for problem in problems}


@pytest.mark.parametrize("name", ["a.png", "a.txt", "metadata.jsonl", "metadata.csv"])
def test_a_pickle_under_another_name_is_never_opened_as_one(tmp_path, name):
    data = tmp_path / "data"
    data.mkdir()
    (data / "good.png").write_bytes(saved(photo(), "PNG"))
    (data / "a.png").write_bytes(saved(photo(), "PNG"))
    (data / name).write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    problems = refused(data)
    assert [subject.partition(":")[0] for subject in problems] == [name]
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["a.pt", "a.ckpt", "a.safetensors", "a.zip", "a.py", "a.npz"])
def test_what_is_no_picture_is_not_even_opened(tmp_path, name):
    (tmp_path / "good.png").write_bytes(saved(photo(), "PNG"))
    os.mkfifo(tmp_path / name)  # opening it would wait for ever
    assert refused(tmp_path) == {}


def test_pipes_sockets_and_devices_are_refused_without_waiting(tmp_path):
    (tmp_path / "good.png").write_bytes(saved(photo(), "PNG"))
    os.mkfifo(tmp_path / "pipe.png")
    os.mkfifo(tmp_path / "good.txt")
    (tmp_path / "null.png").symlink_to("/dev/null")
    (tmp_path / "endless.png").symlink_to("/dev/zero")
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind("socket.png")
    finally:
        os.chdir(here)
    names = {"pipe.png", "good.txt", "null.png", "endless.png", "socket.png"}
    assert refused(tmp_path) == dict.fromkeys(names, "is no regular file")


@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_a_link_that_is_turned_between_the_look_and_the_opening_does_no_harm(tmp_path, target):
    (tmp_path / "orig").write_bytes(saved(photo(), "PNG"))
    os.mkfifo(tmp_path / "pipe")
    link = tmp_path / "a.png"
    link.symlink_to("orig")
    (candidate,) = discover(tmp_path, options=DatasetConfig(str(tmp_path), "x")).candidates
    link.unlink()
    link.symlink_to(target)
    problem = inspect(candidate).problem
    assert (problem.subject, problem.why) == ("a.png", "cannot be read (is no regular file)")


def test_links_in_a_circle_and_out_of_the_folder_are_refused_or_listed(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "outside.png").write_bytes(saved(photo(), "PNG"))
    (data / "out.png").symlink_to(tmp_path / "outside.png")
    (data / "loop.png").symlink_to("loop.png")
    (data / "up").symlink_to("..")
    assert refused(data) == {"loop.png": "is a link to nothing", "up": "is a link to a folder"}
    found = discover(data, options=DatasetConfig(str(data), "x"))
    assert list(found.notes.values()) == [("out.png",)]


NAMES = ["-rf.png", "CON.png", "a..png", "a .png", " a.png", "%2e%2e.png", "$(touch x).png"]
NAMES += ["a;b.png", "a\\x.png", "a*.png", "x" * 250 + ".png", "{a}.png", "\u05d0\u05d1.png"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_name_whatever_it_means_elsewhere(tmp_path, name):
    (tmp_path / name).write_bytes(saved(photo(), "PNG"))
    assert refused(tmp_path) == {}
    (candidate,) = discover(tmp_path, options=DatasetConfig(str(tmp_path), "x")).candidates
    assert (candidate.name, candidate.path) == (name, tmp_path / name)


@pytest.mark.parametrize(
    "name", ["../outside.png", "/etc/passwd", "a/../../outside.png", "\0", "."]
)
def test_a_row_leads_nowhere_out_of_the_data_set(tmp_path, name):
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "outside.png").write_bytes(saved(photo(), "PNG"))
    (data / "a.png").write_bytes(saved(photo(), "PNG"))
    text = '{"file_name": %s, "text": "x"}' % ('"' + name.replace("\0", "\\u0000") + '"')
    (data / "metadata.jsonl").write_text(text)
    ((subject, why),) = refused(data).items()
    assert subject == "metadata.jsonl:1"
    assert why.startswith("there is no picture")


def test_a_caption_is_data_whatever_it_says(tmp_path):
    (tmp_path / "a.png").write_bytes(saved(photo(), "PNG"))
    text = "${oc.env:HOME} {0} %s $(touch x) <script>alert(1)</script> _target_: os.system"
    (tmp_path / "a.txt").write_text(text)
    (candidate,) = discover(tmp_path, options=DatasetConfig(str(tmp_path))).candidates
    assert candidate.captions == (text,)


def test_many_files_and_deep_folders_are_searched(tmp_path):
    deep = tmp_path.joinpath(*["d"] * 100)
    deep.mkdir(parents=True)
    (deep / "a.png").write_bytes(saved(photo(), "PNG"))
    assert refused(tmp_path) == {}
