"""What is asked of the Hub: the index, one component's listing, one component's files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lib.errors import InputRefused, Problem
from lib.keys import file_digest

PLAIN_WEIGHTS = ("model.safetensors", "diffusion_pytorch_model.safetensors")
UNUSED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx*", "*.fp16.*")


@dataclass(frozen=True)
class Listing:
    """A component's small files, on disk, and the SHA-256 of all that identify it."""

    folder: Path
    digests: Mapping[str, str]


def index(repo: str, *, revision: str | None) -> Path:
    """The snapshot folder that holds model_index.json; its name is the commit."""
    from huggingface_hub import hf_hub_download

    with _explained(repo, revision):
        return Path(hf_hub_download(repo, "model_index.json", revision=revision)).parent


def configuration(repo: str, commit: str, *, component: str) -> Path:
    """One component's config.json."""
    from huggingface_hub import hf_hub_download

    with _explained(repo, commit):
        return Path(hf_hub_download(repo, f"{component}/config.json", revision=commit))


def component(repo: str, commit: str, *, component: str) -> Path:
    """Download one component's files; returns the snapshot folder."""
    from huggingface_hub import snapshot_download

    with _explained(repo, commit):
        root = snapshot_download(
            repo, revision=commit, allow_patterns=[f"{component}/*"], ignore_patterns=list(UNUSED)
        )
    return Path(root)


def listing(repo: str, commit: str, *, component: str) -> Listing:
    """Digests: the commit's listing names large files by SHA-256; small ones are read."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    with _explained(repo, commit):
        small = [f"{component}/*{suffix}" for suffix in (".json", ".txt", ".model", ".jinja")]
        root = Path(snapshot_download(repo, revision=commit, allow_patterns=small))
        try:
            large = _large_files(repo, commit, component=component)
        except HfHubHTTPError:
            raise  # an answer, if a bad one, is no missing network
        except (OfflineModeIsEnabled, HTTPError):
            # Without the network, what is cached is what there is.
            cached = sorted((root / component).glob("*.safetensors"))
            large = {path.name: file_digest(path) for path in cached}
    folder = root / component
    wanted = weight_files(folder) or [name for name in PLAIN_WEIGHTS if name in large]
    absent = [name for name in wanted if name not in large and not (folder / name).is_file()]
    if absent:
        why = f"{component}/{absent[0]} is not cached and the Hub cannot be reached"
        raise InputRefused(Problem(f"family.base={repo}", why, remedy="connect once"))
    digests = {name: large.get(name) or file_digest(folder / name) for name in wanted}
    return Listing(folder=root, digests=digests)


def _large_files(repo: str, commit: str, *, component: str) -> dict[str, str]:
    from huggingface_hub import HfApi

    tree: Any = HfApi().list_repo_tree(repo, component, revision=commit)
    return {PurePosixPath(f.path).name: f.lfs.sha256 for f in tree if getattr(f, "lfs", None)}


def weight_files(folder: Path) -> list[str]:
    """The files a loader would read: an index's shards, the one plain file, or a vocabulary."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        weight_map = json.loads(indexes[0].read_text(encoding="utf-8"))["weight_map"]
        return sorted(set(weight_map.values()))
    found = [name for name in PLAIN_WEIGHTS if (folder / name).is_file()]
    if found or not (folder / "tokenizer_config.json").is_file():
        return found
    files_there = sorted(path.name for path in folder.iterdir() if path.is_file())
    return [name for name in files_there if name != "tokenizer_config.json"]


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """The Hub's refusals as one line each; the token is never part of it."""
    from huggingface_hub import errors

    setting = f"family.base={repo}"
    try:
        yield
    except errors.GatedRepoError as error:
        remedy = "accept its licence on its page, then log in with `hf auth login`"
        raise InputRefused(Problem(setting, "is gated", remedy=remedy)) from error
    except errors.RepositoryNotFoundError as error:
        remedy = "check the id; a private one needs `hf auth login`"
        raise InputRefused(Problem(setting, "is not on the Hub", remedy=remedy)) from error
    except errors.RevisionNotFoundError as error:
        why = f"{repo} has no such revision"
        raise InputRefused(Problem(f"family.revision={revision}", why)) from error
    except errors.EntryNotFoundError as error:
        why = "is not cached and the Hub cannot be reached, or it is no pipeline folder"
        remedy = "connect once, or give a local folder"
        raise InputRefused(Problem(setting, why, remedy=remedy)) from error
    except errors.HFValidationError as error:
        allowed = "a Hub id, a folder made by save_pretrained, or tiny"
        raise InputRefused(Problem(setting, "is no Hub id and no folder", allowed)) from error
    except errors.HfHubHTTPError as error:
        code = getattr(error.response, "status_code", "no status")
        remedy = "try again later"
        raise InputRefused(Problem(setting, f"the Hub answered {code}", remedy=remedy)) from error
