"""The Hub's own client against a stand-in of the Hub's HTTP."""

import shutil
import time

import pytest

from lib.errors import InputRefused
from lib.families import flux
from lib.hub import open_base
from lib.memory import Memory
from lib.schema import FamilyConfig
from tests.unit.hub_server import COMMIT, HubServer, serving

TOKEN = "hf_thisisnorealtokenbutasecretallthesame"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases") / "flux"
    flux.build_tiny(folder)
    return folder


@pytest.fixture
def hub(pristine, tmp_path, monkeypatch):
    """A Hub with one open and one gated repository, and an empty cache."""
    from huggingface_hub import constants

    repos = {
        "someone/flux": pristine,
        "someone/gated": pristine,
        "someone/weights": pristine / "vae",
    }
    with serving(HubServer(repos, gated=("someone/gated",))) as server:
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


@pytest.fixture
def opened(tmp_path):
    """Opens a base by its id, as a machine does that remembers nothing or something."""

    def open_(base, *, store="store", revision=None):
        config = FamilyConfig(base=base, revision=revision)
        root = tmp_path / store
        return open_base(config, family=flux, store=root, memory=Memory(root))

    return open_


def test_opening_a_base_asks_for_its_index_alone(hub, opened):
    base = opened("someone/flux")
    assert base.name == f"hub:someone/flux@{COMMIT}"
    asked = hub.asked_for("someone")
    assert asked
    assert {path.rsplit("/", 1)[-1] for path in asked} == {"model_index.json"}


def test_identities_are_those_of_the_same_weights_in_a_folder_without_a_download(
    hub, opened, pristine
):
    remote, local = opened("someone/flux"), opened(str(pristine), store="other")
    for component in flux.FACTS.classes:
        assert remote.identity(component) == local.identity(component)
    assert not hub.asked_for("resolve") or not [
        path for path in hub.asked_for("resolve") if path.endswith(".safetensors")
    ]


def test_a_component_is_downloaded_by_itself_and_once(hub, opened, pristine):
    name = "diffusion_pytorch_model.safetensors"
    folder = opened("someone/flux").folder("vae")
    assert (folder / name).read_bytes() == (pristine / "vae" / name).read_bytes()
    weights = [path for path in hub.asked_for(".safetensors") if "resolve" in path]
    assert weights
    assert all("/vae/" in path for path in weights)
    hub.requests.clear()
    opened("someone/flux").folder("vae")
    assert not hub.asked_for(".safetensors")


@pytest.mark.parametrize("revision", ["main", COMMIT])
def test_a_revision_is_pinned_to_its_commit(hub, opened, revision):
    assert opened("someone/flux", revision=revision).name.endswith(f"@{COMMIT}")


@pytest.mark.parametrize(
    ("base", "revision", "words"),
    [
        ("someone/gated", None, ["family.base=someone/gated", "gated", "hf auth login"]),
        ("someone/nothing", None, ["family.base=someone/nothing", "not on the Hub"]),
        ("someone/flux", "v9", ["family.revision=v9", "no such revision"]),
        ("someone/weights", None, ["family.base=someone/weights", "pipeline"]),
    ],
)
def test_a_refusal_of_the_hub_is_one_line_after_a_cheap_request(hub, opened, base, revision, words):
    with pytest.raises(InputRefused) as caught:
        opened(base, revision=revision)
    (line,) = str(caught.value).splitlines()
    assert all(word in line for word in words), line
    assert len(hub.requests) <= 2
    assert hub.requests[0][0] == "HEAD"


def test_a_gated_base_opens_with_a_token_that_is_seen_nowhere(
    hub, opened, monkeypatch, capfd, tmp_path
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    base = opened("someone/gated")
    base.identity("vae")
    assert {token for _, _, token in hub.requests} == {f"Bearer {TOKEN}"}
    hub.repos.pop("someone/gated")
    with pytest.raises(InputRefused) as caught:
        opened("someone/gated", store="other").folder("transformer")
    assert TOKEN not in str(caught.value)
    assert TOKEN not in "".join(capfd.readouterr())
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if TOKEN.encode() in path.read_bytes()]


def test_a_hub_that_fails_is_said_so_and_a_cached_base_still_opens(hub, opened, monkeypatch):
    known = opened("someone/flux")
    known.folder("vae")
    hub.broken = True
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client's between its attempts
    with pytest.raises(InputRefused, match=r"family\.base=someone/gated"):
        opened("someone/gated", store="other")
    hub.broken = False
    hub.repos.clear()  # gone from the Hub: the cache still holds what was fetched
    shutil.rmtree(known.root / "transformer", ignore_errors=True)
    with pytest.raises(InputRefused):
        opened("someone/flux", store="third").folder("transformer")
