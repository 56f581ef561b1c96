"""Adapter files of ours and of others, sound and broken: all is recognised, each fault is named."""

import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lib import families, foreign
from lib.errors import InputRefused
from lib.findings import Findings, printable
from lib.inspecting import inspect_file
from lib.likeness import fit, likely
from lib.naming import KOHYA
from lib.reading import METADATA_KEY
from tests.unit.exports.cells import SCALED, drawn, trained
from tests.unit.exports.strangers import (
    flux_of_sd_scripts,
    krea2_of_ai_toolkit,
    qwen_image_of_musubi_tuner,
)

EVERY = {name: families.get(name) for name in families.names()}
STEM = "lora_unet_transformer_blocks_0_attn_to_q"


def pair(module=STEM, *, rank=4, rows=32, columns=32, alpha=4.0, halves=("lora_down", "lora_up")):
    down, up = (f"{module}.{half}.weight" for half in halves)
    tensors = {down: drawn("A", (rank, columns)), up: drawn("B", (rows, rank))}
    return tensors | ({f"{module}.alpha": torch.tensor(alpha)} if alpha else {})


def saved(tensors, path, metadata=None):
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata=metadata)
    return path


def raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def faults_of(path):
    return {fault.what: fault.names for fault in inspect_file(path).faults}


def lines_of(path, *, private=False, family=None, fitted=None, base="tiny"):
    found = inspect_file(path)
    findings = Findings(found, likely(found, EVERY), family, base, fitted)
    return list(findings.lines(private=private))


@pytest.mark.parametrize(("name", "format", "scale"), SCALED)
def test_what_we_export_is_recognised_and_fits_its_base(name, format, scale, tmp_path):
    adapter = trained(name, scale)
    found = inspect_file(adapter.write(tmp_path, format))
    guess, fitted = likely(found, EVERY), fit(found, adapter.family, adapter.component)
    assert (guess.families, guess.by) == ((name,), "its modules' names")
    layouts = adapter.family.NAMES.layouts
    of_kohya = format in layouts and layouts[format] == layouts.get(KOHYA)
    same = KOHYA if of_kohya else format  # of SDXL ComfyUI reads kohya's
    assert found.spelt.formats == (same,)
    assert (found.faults, fitted.faults, fitted.left_alone) == ((), (), ())
    assert found.kinds == {"LoRA": len(found.pairs)}
    assert {one.strength.scale for one in found.pairs} == {1.0}
    unfused = [one for one in found.pairs if one.rank <= 6]
    expected = {change.rank for change in adapter.changes.values()}
    assert {one.rank for one in unfused} <= expected
    assert all(one.strength.alpha in (None, one.rank) for one in found.pairs)
    assert found.dtypes.keys() == {"F32"}


@pytest.mark.parametrize("scale", ["half", "rsLoRA"])
@pytest.mark.parametrize("name", EVERY)
def test_norms_are_those_of_the_dense_changes(name, scale, tmp_path):
    adapter = trained(name, scale)
    found = inspect_file(adapter.write(tmp_path, "diffusers"))
    dense = {module: float((c.up @ c.down).norm()) for module, c in adapter.changes.items()}
    assert {one.module.stem: one.norm for one in found.pairs} == pytest.approx(dense, rel=1e-6)


@pytest.mark.parametrize("rank", [1, 31, 33, 80])
def test_a_rank_above_the_width_is_measured_as_well(rank, tmp_path):
    tensors = pair(rank=rank, rows=64, alpha=rank / 2)
    (found,) = inspect_file(saved(tensors, tmp_path / "a.safetensors")).pairs
    down, up = (tensors[f"{STEM}.lora_{half}.weight"].double() for half in ("down", "up"))
    assert found.norm == pytest.approx(float((up @ down).norm()) / 2)


def test_values_at_the_end_of_their_range_are_no_error(tmp_path):
    tensors = {name: tensor.double() * 1e300 for name, tensor in pair(alpha=0).items()}
    path = saved(tensors, tmp_path / "a.safetensors")
    assert inspect_file(path).pairs[0].norm == float("inf")
    assert any(" inf" in line for line in lines_of(path))


def test_peft_s_description_gives_alpha_and_scale(tmp_path):
    names = ("to_q", "to_k")
    tensors = {
        key: tensor
        for name in names
        for key, tensor in pair(
            f"transformer.transformer_blocks.0.attn.{name}", alpha=0, halves=("lora_A", "lora_B")
        ).items()
    }
    told = {
        "transformer.lora_alpha": 8,
        "transformer.use_rslora": True,
        "transformer.alpha_pattern": {"to_k": 2},
    }
    path = saved(tensors, tmp_path / "a.safetensors", {METADATA_KEY: json.dumps(told)})
    found = inspect_file(path)
    assert found.faults == ()
    scales = {one.module.stem.rsplit(".")[-1]: one.strength.scale for one in found.pairs}
    assert scales == {"to_q": 8 / 2, "to_k": 2 / 2}


STRANGERS = {
    "flux": (flux_of_sd_scripts, "kohya", {0.5, 1.0}),
    "krea2": (krea2_of_ai_toolkit, "comfyui", {1.0}),
    "qwen_image": (qwen_image_of_musubi_tuner, "kohya", {0.25}),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_file_of_another_trainer_is_recognised(name, tmp_path):
    made, format, scales = STRANGERS[name]
    found = inspect_file(saved(made(), tmp_path / "a.safetensors"))
    assert likely(found, EVERY).families == (name,)
    assert found.spelt.formats == (format,)
    assert found.faults == ()
    assert {one.strength.scale for one in found.pairs} == scales
    fitted = fit(found, EVERY[name], trained(name).component)
    assert fitted.faults == ()


def test_blocks_of_the_base_that_a_file_leaves_alone_are_told(tmp_path):
    tensors = load_file(trained("qwen_image").write(tmp_path, "diffusers"))
    first = {name: tensor for name, tensor in tensors.items() if "blocks.0." in name}
    found = inspect_file(saved(first, tmp_path / "first.safetensors"))
    fitted = fit(found, EVERY["qwen_image"], trained("qwen_image").component)
    assert (fitted.faults, len(fitted.left_alone)) == ((), 8)


@pytest.mark.parametrize(("name", "other"), [("flux", "qwen_image"), ("sdxl", "flux")])
def test_another_family_s_base_does_not_fit_and_the_right_one_is_named(name, other, tmp_path):
    path = trained(name).write(tmp_path, "diffusers")
    fitted = fit(inspect_file(path), EVERY[other], trained(other).component)
    assert fitted.faults
    text = "\n".join(lines_of(path, family=other, fitted=fitted))
    assert f"not for family={other}: for {name}" in text
    assert "things are wrong" in text


def test_a_base_of_other_sizes_is_named_with_both(tmp_path):
    path = trained("qwen_image").write(tmp_path, "diffusers")
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith("0.attn.to_q.lora_A.weight"))
    tensors[name] = tensors[name][:, :-1]
    found = inspect_file(saved(tensors, tmp_path / "a.safetensors"))
    (fault,) = fit(found, EVERY["qwen_image"], trained("qwen_image").component).faults
    assert fault.what == "sizes other than the base's"
    (rows, columns) = trained("qwen_image").sizes["transformer_blocks.0.attn.to_q"]
    assert fault.names[0].endswith(f" {rows}x{columns - 1}, not {rows}x{columns}")


def test_split_names_of_a_fused_matrix_fit_no_reader_of_kohya_s(tmp_path):
    tensors = pair("lora_unet_layers_0_attention_to_q")
    found = inspect_file(saved(tensors, tmp_path / "a.safetensors"))
    assert likely(found, EVERY).families == ("z_image",)
    (fault,) = fit(found, EVERY["z_image"], trained("z_image").component).faults
    assert "does not have" in fault.what


def test_names_that_several_families_have_are_no_guess(tmp_path):
    path = saved(pair("lora_unet_double_blocks_0_img_attn_proj"), tmp_path / "a.safetensors")
    assert likely(inspect_file(path), EVERY).families == ("flux", "flux2_klein")
    assert any("flux or flux2_klein" in line for line in lines_of(path))


def test_our_header_decides_among_families_that_names_leave_open(tmp_path):
    tensors = pair("lora_unet_double_blocks_0_img_attn_proj")
    path = saved(tensors, tmp_path / "a.safetensors", {"darkroom.family": "flux2_klein"})
    guess = likely(inspect_file(path), EVERY)
    assert (guess.families, guess.by) == (("flux2_klein",), "its header")


def test_a_header_that_names_another_family_than_the_modules_is_not_believed(tmp_path):
    tensors = qwen_image_of_musubi_tuner()
    path = saved(tensors, tmp_path / "a.safetensors", {"darkroom.family": "sdxl"})
    assert likely(inspect_file(path), EVERY).families == ("qwen_image",)


ODD = {
    "DoRA": {f"{STEM}.dora_scale": torch.ones(32, 1)} | pair(),
    "LoHa": {f"{STEM}.hada_w{i}_{ab}": torch.ones(4, 4) for i in (1, 2) for ab in "ab"},
    "LoKr": {f"{STEM}.lokr_w1": torch.ones(4, 4), f"{STEM}.lokr_w2_a": torch.ones(4, 4)},
    "OFT": {f"{STEM}.oft_blocks": torch.ones(4, 4)},
    "whole differences": {f"{STEM}.diff": torch.ones(32, 32)},
    "attention processors": {
        "unet.down_blocks.0.attn1.processor.to_q_lora.down.weight": torch.ones(4, 32)
    },
    "textual inversion": {"emb_params": torch.ones(2, 32)},
    "text encoders": pair("lora_te1_text_model_encoder_layers_0_self_attn_q_proj"),
    "(with a core)": {f"{STEM}.lora_mid.weight": torch.ones(4, 4, 3, 3)} | pair(),
}


@pytest.mark.parametrize("kind", ODD)
def test_other_kinds_are_named_and_are_no_fault(kind, tmp_path):
    found = inspect_file(saved(ODD[kind], tmp_path / "a.safetensors"))
    assert found.faults == ()
    assert any(kind in note.what for note in found.notes)


def test_a_convolution_is_measured_and_is_no_linear_module(tmp_path):
    down, up = drawn("A", (4, 8, 3, 3)), drawn("B", (16, 4, 1, 1))
    stem = "lora_unet_input_blocks_1_0_in_layers_2"
    tensors = {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
    tensors[f"{stem}.alpha"] = torch.tensor(2.0)
    found = inspect_file(saved(tensors, tmp_path / "a.safetensors"))
    dense = torch.einsum("or,rikl->oikl", up[:, :, 0, 0].double(), down.double()) / 2
    assert found.faults == ()
    assert found.pairs[0].norm == pytest.approx(float(dense.norm()))
    assert found.kinds == {"LoCon (of a convolution)": 1}
    assert fit(found, EVERY["sdxl"], trained("sdxl").component).faults == ()


def without(tensors, ending):
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}


def changed(tensors, ending, change):
    return {n: change(t) if n.endswith(ending) else t for n, t in tensors.items()}


OTHER = "lora_unet_transformer_blocks_0_attn_to_k"
DOTTED = "diffusion_model.transformer_blocks.0.attn.to_q"
WRAPPED = "transformer.base_model.model.transformer_blocks.0.attn.to_q"
NATIVE = "transformer.transformer_blocks.0.attn.to_q"
A_B = ("lora_A", "lora_B")
BOTH = pair() | pair(OTHER)
FAULTS = {
    "values that are not finite": changed(
        BOTH, f"{STEM}.lora_up.weight", lambda t: t.index_fill(0, torch.tensor(3), torch.inf)
    ),
    "every change is zero": changed(BOTH, "lora_up.weight", torch.zeros_like),
    "A without B": without(BOTH, f"{STEM}.lora_up.weight"),
    "B without A": without(BOTH, f"{STEM}.lora_down.weight"),
    "neither A nor B": without(without(BOTH, f"{STEM}.lora_down.weight"), f"{STEM}.lora_up.weight"),
    "A and B do not fit each other": changed(BOTH, f"{STEM}.lora_up.weight", lambda t: t[:, :3]),
    "alpha is missing here": without(BOTH, f"{STEM}.alpha"),
    "alpha is missing, which kohya": without(BOTH, ".alpha"),
    "alpha is not one number": changed(BOTH, f"{STEM}.alpha", lambda t: t * torch.nan),
    "one module under two names": pair() | pair(DOTTED, halves=A_B),
    "one module under two": pair() | pair(halves=A_B),
    "keys that no reader": BOTH | {"something.else": torch.ones(3)},
    "several formats": pair() | pair("diffusion_model.blocks.1.attn.wq", halves=A_B),
    "names hold what a wrapper": pair(WRAPPED, halves=A_B, alpha=0),
    "not spelt as readers": pair(halves=A_B),
    "not spelt as": pair(NATIVE, alpha=0),
    "several dtypes": changed(BOTH, f"{STEM}.lora_up.weight", torch.Tensor.half),
    "no adapter": {"model.layers.0.weight": torch.ones(4, 4)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_where_it_is(fault, tmp_path):
    path = saved(FAULTS[fault], tmp_path / "a.safetensors")
    found = faults_of(path)
    (names,) = (names for what, names in found.items() if what.startswith(fault))
    assert names or fault.startswith(("every", "no adapter"))
    assert lines_of(path)[-1] in ("1 thing is wrong", f"{len(found)} things are wrong")


def test_the_files_that_faults_are_put_into_are_sound(tmp_path):
    assert faults_of(saved(BOTH, tmp_path / "a.safetensors")) == {}
    assert faults_of(saved(pair(NATIVE, halves=A_B, alpha=0), tmp_path / "b.safetensors")) == {}


def test_a_module_that_nothing_reached_is_no_fault(tmp_path):
    """Of the last block's text stream no family's loss sees anything: its B stays zero."""
    tensors = changed(BOTH, f"{STEM}.lora_up.weight", torch.zeros_like)
    found = inspect_file(saved(tensors, tmp_path / "a.safetensors"))
    assert found.faults == ()
    assert [note.names for note in found.notes] == [(STEM,)]


def test_ranks_of_several_sizes_without_alpha_are_what_readers_take_them_for(tmp_path):
    tensors = without(pair(rank=2) | pair(OTHER, rank=4), ".alpha")
    assert faults_of(saved(tensors, tmp_path / "a.safetensors")) == {}


DESCRIPTIONS = {
    "no JSON": "{",
    "a list": "[1]",
    "an alpha that is text": json.dumps({"transformer.lora_alpha": "8"}),
    "an alpha beyond all numbers": json.dumps({"transformer.lora_alpha": 10**400}),
    "an alpha that is none": '{"transformer.lora_alpha": NaN}',
    "patterns that are none": json.dumps({"transformer.alpha_pattern": [1]}),
    "a pattern that does not end": json.dumps({"transformer.alpha_pattern": {"(a": 1}}),
    "a pattern that takes for ever": json.dumps({"transformer.alpha_pattern": {"(a+)+b": 1}}),
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_a_description_that_cannot_be_followed_is_named(case, tmp_path):
    tensors = pair(NATIVE, halves=A_B, alpha=0)
    path = saved(tensors, tmp_path / "a.safetensors", {METADATA_KEY: DESCRIPTIONS[case]})
    (what,) = faults_of(path)
    assert what.startswith(METADATA_KEY)


def test_alpha_in_two_places_is_named(tmp_path):
    told = {METADATA_KEY: json.dumps({"transformer.lora_alpha": 8})}
    path = saved(pair(NATIVE, halves=A_B), tmp_path / "a.safetensors", told)
    assert list(faults_of(path)) == [
        "alpha is there twice, as a tensor and in the header's description"
    ]


@pytest.fixture
def ours(tmp_path):
    return trained("qwen_image").write(
        tmp_path, "diffusers", provenance={"family": "qwen_image", "steps": "500"}
    )


def test_a_flipped_bit_in_a_file_of_ours_is_seen(ours):
    data = bytearray(ours.read_bytes())
    data[-3] ^= 1
    ours.write_bytes(data)
    assert list(faults_of(ours)) == [
        "its digest does not match: it was changed after it was written"
    ]


def test_half_a_character_in_a_header_of_ours_is_a_digest_that_does_not_match(tmp_path):
    header = {"__metadata__": {"digest": "0" * 64, "darkroom.family": "\ud800"}}
    text = json.dumps(header).encode()
    found = faults_of(raw(tmp_path / "a.safetensors", text))
    assert any(what.startswith("its digest") for what in found)
    assert lines_of(tmp_path / "a.safetensors")


def test_a_file_of_ours_that_another_tool_wrote_again_is_told(ours, tmp_path):
    again = saved(load_file(ours), tmp_path / "again.safetensors", {"darkroom.steps": "500"})
    found = inspect_file(again)
    assert found.faults == ()
    assert any("digest is gone" in note.what for note in found.notes)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.999])
def test_a_file_cut_short_is_named(ours, kept):
    data = ours.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    ours.write_bytes(data[: max(9, header - 4)] if not kept else data[: int(len(data) * kept)])
    assert any(what.startswith("cut short") for what in faults_of(ours))


def test_bytes_after_the_last_tensor_are_named(ours):
    ours.write_bytes(ours.read_bytes() + b"12345")
    assert "5 bytes after the last tensor" in faults_of(ours)


def entry(start, end, *, dtype="F32", shape=(1,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


HEADERS = {
    "overlap": {"a": entry(0, 4), "b": entry(2, 6)},
    "leave a hole": {"a": entry(0, 4), "b": entry(8, 12)},
    "beyond the end": {"a": entry(0, 4 << 20, shape=(1 << 20,))},
    "not as long": {"a": entry(0, 8)},
    "a dtype that is not read": {"a": entry(0, 4, dtype="F4")},
    "describe no tensor": {
        "a": entry(0, 4),
        "b": 3,
        "c": entry(4, 0),
        "d": entry(-4, 0),
        "e": entry(0, 0, shape=[0] * 60),
        "f": entry(0, True),
    },
    "occurs twice": b'{"a":' + json.dumps(entry(0, 4)).encode() + b',"a":1}',
    "metadata is not all text": {"__metadata__": {"a": 1}},
    "metadata is": {"__metadata__": 7},
}


@pytest.mark.parametrize("fault", HEADERS)
def test_a_header_that_contradicts_itself_or_the_file_is_named(fault, tmp_path):
    path = raw(tmp_path / "a.safetensors", HEADERS[fault], bytes(12))
    assert any(fault in what for what in faults_of(path))
    assert lines_of(path)[-1].endswith("wrong")


def test_a_tensor_of_no_elements_and_endless_sides_is_no_error(tmp_path):
    shape = (0, 1 << 62, 1 << 62)
    header = {f"{STEM}.lora_{half}.weight": entry(0, 0, shape=shape) for half in ("up", "down")}
    assert "A and B do not fit each other" in faults_of(raw(tmp_path / "a.safetensors", header))


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def zipped(path, canary):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(canary))


def pickled(path, canary):
    path.write_bytes(pickle.dumps(canary))


@pytest.mark.parametrize("write", [zipped, pickled])
@pytest.mark.parametrize("name", ["a.safetensors", "a.ckpt", "a.pt", "a.bin", "a"])
def test_a_pickle_is_refused_and_not_run(name, write, tmp_path):
    write(tmp_path / name, Canary(tmp_path / "ran"))
    with pytest.raises(InputRefused, match="is a pickle"):
        inspect_file(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_a_safetensors_file_whose_length_begins_like_a_pickle_is_read(tmp_path):
    text = b"{}".ljust(0x0280)
    assert raw(tmp_path / "a.safetensors", text).read_bytes()[:2] == b"\x80\x02"
    assert "no adapter: no key is of an adapted module" in faults_of(tmp_path / "a.safetensors")


REFUSED = {
    "is no safetensors file": b"\x05\0\0\0\0\0\0\0hello",
    "is a GGUF file": b"GGUF" + bytes(20),
    "pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\n",
    "a header of": (1 << 62).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": (2).to_bytes(8, "little") + b"{]",
    "a header that is no JSON (maximum recursion": (50_005).to_bytes(8, "little")
    + b'{"a":'
    + b"[" * 50_000,
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_safetensors_file_is_refused_as_what_it_is(why, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(REFUSED[why])
    with pytest.raises(InputRefused) as refused:
        inspect_file(tmp_path / "a.safetensors")
    assert why in str(refused.value)


def test_what_is_not_there_and_a_folder_are_refused(tmp_path):
    for path, why in ((tmp_path, "is a folder"), (tmp_path / "none", "is not there")):
        with pytest.raises(InputRefused, match=why):
            inspect_file(path)


def test_a_header_is_read_to_its_limit_and_no_further(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "HEADER_CAP_BYTES", 64)
    raw(tmp_path / "a", b"{}".ljust(64))
    assert inspect_file(tmp_path / "a").file.faults == ()
    raw(tmp_path / "b", b"{}".ljust(65))
    with pytest.raises(InputRefused, match="at most 64"):
        inspect_file(tmp_path / "b")


SECRETS = {
    "ss_dataset_dirs": '{"10_my-sister": {}}',
    "ss_tag_frequency": '{"secret tag": 1}',
    "darkroom.instance_prompt": "a picture of my sister",
}


def test_captions_and_folder_names_are_shown_only_when_asked_for(tmp_path):
    shown = {"ss_learning_rate": "1e-4", "darkroom.trigger": "sks", "modelspec.date": "2026"}
    path = saved(BOTH, tmp_path / "a.safetensors", {**SECRETS, **shown, "ss_anything": "else"})
    text = "\n".join(lines_of(path))
    assert all(value in text for value in shown.values())
    assert not [value for value in [*SECRETS.values(), "else"] if value in text]
    assert "export.prompts=true" in text
    asked = "\n".join(lines_of(path, private=True))
    assert all(value in asked for value in SECRETS.values())


def test_of_a_path_on_somebody_s_disk_the_last_part_is_shown(tmp_path):
    path = saved(BOTH, tmp_path / "a", {"ss_sd_model_name": "C:\\Users\\me\\model.safetensors"})
    assert "  ss_sd_model_name: model.safetensors" in lines_of(path)


def test_a_header_moves_no_cursor_and_shows_no_login(tmp_path):
    told = {"darkroom.trigger": "\x1b[2Jsks\nnext\u202e", "ss_seed": "http://me:word@host/x"}
    tensors = BOTH | {"\x1b[31mkey": torch.ones(1)}
    lines = lines_of(saved(tensors, tmp_path / "a.safetensors", told))
    assert all(line.isprintable() for line in lines)
    assert "word" not in "".join(lines)
    assert len(printable("x" * 5000)) < 200


def test_blocks_are_in_the_order_of_their_numbers(tmp_path):
    stems = [f"lora_unet_transformer_blocks_{number}_attn_to_q" for number in (10, 9)]
    tensors = {name: tensor for stem in stems for name, tensor in pair(stem).items()}
    lines = lines_of(saved(tensors, tmp_path / "a.safetensors"))
    rows = [line.split() for line in lines if line.startswith("  transformer_blocks")]
    assert [row[:2] for row in rows] == [
        ["transformer_blocks_9", "1"],
        ["transformer_blocks_10", "1"],
    ]


WHOLE = {}


def whole(tmp_path_factory):
    """The bytes of a file of ours, and of one of another tool's, made once."""
    if not WHOLE:
        folder = tmp_path_factory.mktemp("whole")
        path = saved(BOTH, folder / "theirs.safetensors", {"ss_seed": "1"})
        WHOLE["theirs"] = path.read_bytes()
        WHOLE["ours"] = trained("qwen_image").write(folder, "diffusers").read_bytes()
    return WHOLE


def told(path, data):
    """What is printed, or the refusal; anything else is a fault of ours."""
    path.write_bytes(data)
    try:
        return lines_of(path)
    except InputRefused as refused:
        return [str(refused)]


@given(data=st.binary(max_size=300))
def test_random_bytes_are_refused_or_told(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "random"
    assert told(path, data)
    assert told(path, len(data).to_bytes(8, "little") + b"{" + data)


@given(data=st.data(), which=st.sampled_from(["ours", "theirs"]))
def test_a_truncated_or_spoilt_file_is_refused_or_told(data, which, tmp_path_factory):
    content = bytearray(whole(tmp_path_factory)[which])
    cut = data.draw(st.integers(0, len(content)))
    header = 8 + int.from_bytes(content[:8], "little")
    for place in data.draw(st.lists(st.integers(0, header), max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "spoilt"
    assert told(path, bytes(content))
    assert told(path, bytes(content[:cut]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [f"{STEM}.lora_down.weight", f"{STEM}.lora_up.weight", f"{STEM}.alpha", "x", "__metadata__"]
)


@given(header=st.dictionaries(KEYS, JSON | st.builds(entry, st.integers(), st.integers())))
def test_any_json_for_a_header_is_refused_or_told(header, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "json"
    text = json.dumps(header).encode()
    assert told(path, len(text).to_bytes(8, "little") + text + bytes(64))
