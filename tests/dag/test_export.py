"""Export through the graph: each format once, with what lies beside the files."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from lib.errors import InputRefused

FORMATS = ("diffusers", "kohya", "comfyui")
RUN = ("name=v1.5_test", "adapter.alpha=8", "sample.steps=2", "export.dtype=fp32")


def files_of(manifest):
    return {name: Path(made["file"]) for name, made in manifest.payload["files"].items()}


def header_of(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize(
    "format", ["diffusers", pytest.param("kohya", marks=pytest.mark.nightly), "comfyui"]
)
def test_each_format_is_proven_published_and_drawn_with(ensure, format, tmp_path):
    sampled = ensure("sample", *RUN, f"export.format={format}")
    manifest = ensure("export", *RUN, f"export.format={format}")
    made = files_of(manifest)
    folder = tmp_path / "outputs/v1.5_test/exports" / f"{format}-fp32"
    names = {"adapter": "v1-5_test.safetensors", "ema": "v1-5_test-ema.safetensors"}
    if format == "diffusers":
        names = dict.fromkeys(names, "pytorch_lora_weights.safetensors")
    assert made == {
        "adapter": folder / names["adapter"],
        "ema": folder / "ema" / names["ema"],
    }
    assert not list(folder.rglob("unproven*"))
    for name, path in made.items():
        told = json.loads(path.with_suffix(".json").read_text())
        assert (told["family"], told["rank"], told["alpha"]) == ("flux", 4, 8)
        assert (told["steps"], told["resolution"], told["adapter"]) == (6, 64, name)
        assert told["trigger"] is None
        header = header_of(path)
        assert header["darkroom.steps"] == "6"
        assert header["darkroom.train_key"] == told["keys"]["train"]
        assert all(len(digest) == 64 for digest in told["keys"].values())
    card = (folder / "README.md").read_text()
    assert "grid.png" in card
    grid = np.asarray(Image.open(sampled.payload["files"]["grid"]["file"]).convert("L"), float)
    assert grid.std() > 0


def test_a_grid_shows_the_same_adapter_whatever_the_format(ensure):
    grids = [
        np.asarray(
            Image.open(
                ensure("sample", *RUN, f"export.format={format}").payload["files"]["grid"]["file"]
            ).convert("RGB"),
            dtype=float,
        )
        for format in FORMATS
    ]
    assert all(np.abs(grid - grids[0]).max() <= 2 for grid in grids)


def test_a_second_export_has_a_folder_of_its_own(ensure):
    first = files_of(ensure("export", *RUN))["adapter"]
    data = first.read_bytes()
    first.with_name("README.md").write_text("mine")
    first.write_bytes(b"somebody's")
    second = files_of(ensure("export", *RUN))["adapter"]
    assert (first.read_bytes(), second.read_bytes()) == (b"somebody's", data)
    assert first.with_name("README.md").read_text() == "mine"
    assert second.parent.name == "diffusers-fp32-2"


def test_a_full_disk_leaves_the_earlier_export_and_no_half_file(ensure, monkeypatch):
    from lib.files import StorageFailed

    first = files_of(ensure("export", *RUN))["adapter"]
    data, write = first.read_bytes(), os.write

    def full(descriptor, rest):
        """Room for some bytes of the file, and then none."""
        if len(rest) > 2000:
            return write(descriptor, rest[:1000])
        if len(rest) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, rest)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(StorageFailed, match="bytes needed"):
            ensure("export", *RUN, "export.dtype=bf16")
    assert first.read_bytes() == data
    assert not list(first.parents[1].glob("diffusers-bf16/**/*.safetensors"))
    again = files_of(ensure("export", *RUN, "export.dtype=bf16"))["adapter"]
    assert again.is_file()


def test_the_run_keeps_what_it_trained_and_only_the_file_is_cast(ensure, adapter_of):
    trained = ensure("train", *RUN)
    before = adapter_of(trained)
    file = files_of(ensure("export", *RUN, "export.dtype=bf16"))["adapter"]
    assert adapter_of(trained) == before
    assert {str(t.dtype) for t in load_file(file).values()} == {"torch.bfloat16"}
    exact = load_file(files_of(ensure("export", *RUN))["adapter"])
    assert {str(t.dtype) for t in exact.values()} == {"torch.float32"}


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_and_folder_names_are_told_only_when_asked(ensure, asked, data):
    secret = "a photo of qqsecret"
    words = (*RUN, f"dataset.instance_prompt={secret}", f"export.prompts={str(asked).lower()}")
    for sidecar in data.glob("*.txt"):
        sidecar.unlink()
    ensure("sample", *words)
    file = files_of(ensure("export", *words))["adapter"]
    folder = file.parent
    texts = [str(header_of(file)), file.with_suffix(".json").read_text()]
    texts.append((folder / "README.md").read_text())
    assert [secret in text for text in texts] == [asked] * 3
    whole = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert (b"qqsecret" in whole) == asked
    assert str(data).encode() not in whole


def test_a_format_that_the_family_has_not_is_refused_before_anything_is_made(configure):
    from lib.pipeline import graph

    config = configure("family=krea2", "family.base=tiny", "export.format=kohya")
    found = [p for p in graph.problems(config, online=False) if "export" in p.subject]
    (problem,) = found
    assert problem.subject == "export.format=kohya"
    assert problem.allowed == "diffusers, comfyui"


@pytest.mark.parametrize(
    ("family", "target", "lost"),
    [
        pytest.param("flux", "x_embedder", "x_embedder", marks=pytest.mark.nightly),
        ("flux", "proj_out", "proj_out"),  # of the single blocks, and of the model
        ("flux", "timestep_embedder.linear_1", "time_text_embed.timestep_embedder.linear_1"),
        ("z_image", "all_final_layer.*.linear", "all_final_layer.2-1.linear"),
    ],
)
def test_a_module_that_a_format_loses_is_refused_before_it_is_trained(
    configure, family, target, lost
):
    from lib.pipeline import graph

    def found(format, target=target):
        given = (f"family={family}", "family.base=tiny", f"adapter.targets=['to_q','{target}']")
        config = configure(*given, f"export.format={format}")
        return [p for p in graph.problems(config, online=False) if "export" in p.subject]

    (problem,) = found("kohya")
    assert f"leave out {lost}, which adapter.targets={target} means" in problem.why
    assert problem.allowed == "diffusers, comfyui"
    assert found("diffusers") == found("comfyui") == found("kohya", "to_k") == []


def test_an_adapter_that_changes_nothing_is_not_exported(ensure, tmp_path):
    from lib.exporting import export_adapter
    from lib.families import flux
    from lib.hub import Component
    from lib.records import from_stored, to_stored
    from lib.runs import ADAPTER_FILE
    from lib.schema import Config
    from lib.tensors import decode, encode

    ensure("train", *RUN)
    trained = tmp_path / "outputs/v1.5_test" / ADAPTER_FILE
    state = from_stored(decode(trained.read_bytes()).tensors)
    still = {name: t * 0 if "lora_B" in name else t for name, t in state.items()}
    path = tmp_path / "still.safetensors"
    path.write_bytes(encode(to_stored(still), metadata={}))
    denoiser = Component("FluxTransformer2DModel", flux.TINY["transformer"], {})
    with pytest.raises(InputRefused, match="every B is zero"):
        export_adapter(
            path,
            tmp_path / "out",
            config=Config(),
            family=flux,
            denoiser=denoiser,
            provenance={},
        )
    assert not (tmp_path / "out").exists()
