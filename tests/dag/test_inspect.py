"""The door that looks into adapter files: exit codes, bases of every kind, nothing read or written."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import stages
from stages.inspect import looking_at
from tests.unit.exports.cells import trained

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def inspect(tmp_path, monkeypatch, capsys):
    """Looks at a file as the command does: exit code, both outputs; nothing may be left behind."""
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    monkeypatch.chdir(workplace)

    def run(file, *given):
        words = [*given, "paths.store=store", "paths.outputs=outputs"]
        with pytest.raises(SystemExit) as exit:
            stages.main(looking_at(str(file), words), arguments=words, opens_base=False)
        assert list(workplace.iterdir()) == []
        said = capsys.readouterr()
        return exit.value.code, said.out, said.err

    return run


@pytest.fixture
def exported(tmp_path):
    """A file of a family's tiny base; FLUX's is as wide as the real one."""

    def made(name, format="diffusers"):
        (tmp_path / name).mkdir(exist_ok=True)
        return trained(name).write(tmp_path / name, format)

    return made


def test_a_sound_file_ends_with_0_and_says_so(inspect, exported):
    code, out, err = inspect(exported("qwen_image"))
    assert (code, err, out.splitlines()[-1]) == (0, "", "sound")
    assert "family    qwen_image (by its modules' names)" in out


@pytest.mark.parametrize("given", [[], ["family=qwen_image"]])
def test_a_file_that_fits_a_base_says_which(inspect, exported, given):
    code, out, _ = inspect(exported("qwen_image"), *given, "family.base=tiny")
    assert (code, out.splitlines()[-1]) == (0, "sound, and fits family.base=tiny")


def test_what_a_run_exports_is_sound_and_fits_its_base_and_tells_where_it_is_from(
    inspect, ensure, base
):
    made = ensure("export", "dataset.trigger=sks").payload["files"]["adapter"]["file"]
    code, out, _ = inspect(made, f"family.base={base}")
    assert code == 0
    for line in ("base: local", "steps: 6", "trigger: sks", "family    flux (by its header)"):
        assert line in out
    assert "manifest_key: " in out


def test_no_weight_of_a_base_is_needed(inspect, ensure, base, tmp_path):
    made = ensure("export").payload["files"]["adapter"]["file"]
    bare = tmp_path / "bare"
    for name in ("model_index.json", "transformer/config.json"):
        (bare / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(base / name, bare / name)
    assert inspect(made, f"family.base={bare}")[0] == 0


def test_a_base_on_the_hub_is_asked_for_its_configuration_alone(inspect, ensure, base, hub_cache):
    made = ensure("export").payload["files"]["adapter"]["file"]
    snapshot = hub_cache(base)
    for weights in snapshot.rglob("*.safetensors"):
        weights.unlink()
    assert inspect(made, "family.base=someone/flux")[0] == 0


def test_a_base_of_another_family_does_not_fit_and_the_family_is_named(inspect, exported, base):
    code, out, _ = inspect(exported("qwen_image"), f"family.base={base}")
    assert code == 3
    assert "not for family=flux: for qwen_image" in out


def test_another_family_than_the_file_s_is_wrong_without_a_base_too(inspect, exported):
    code, out, _ = inspect(exported("qwen_image"), "family=sdxl")
    assert (code, out.splitlines()[-1]) == (3, "1 thing is wrong")


def test_a_base_that_is_not_the_given_family_s_is_refused(inspect, exported, base):
    code, out, err = inspect(exported("sdxl"), "family=sdxl", f"family.base={base}")
    assert (code, out) == (2, "")
    assert "use family=flux" in err


def test_a_tiny_base_for_names_of_several_families_needs_the_family(inspect, exported, tmp_path):
    tensors = load_file(exported("flux", "kohya"))
    shared = {n: t for n, t in tensors.items() if "img_attn_proj" in n}
    save_file(shared, tmp_path / "shared.safetensors")
    code, _, err = inspect(tmp_path / "shared.safetensors", "family.base=tiny")
    assert code == 2
    assert "allowed: flux, flux2_klein; add family=" in err


def test_a_damaged_file_ends_with_3(inspect, exported):
    path = exported("z_image", "kohya")
    path.write_bytes(path.read_bytes()[:-1])
    code, out, _ = inspect(path)
    assert code == 3
    assert "cut short" in out


@pytest.mark.parametrize("name", ["none.safetensors", "adapter.ckpt", "."])
def test_what_cannot_be_looked_into_is_one_report(inspect, name):
    code, out, err = inspect(name)
    assert (code, out, len(err.splitlines())) == (2, "", 2)


def test_a_mistake_in_the_settings_is_refused_as_everywhere(inspect, exported):
    code, out, err = inspect(exported("sdxl"), "family=fluxx")
    assert (code, out) == (2, "")
    assert "family=fluxx" in err


def test_captions_are_shown_when_asked_for(inspect, tmp_path, exported):
    tensors = load_file(exported("sdxl"))
    path = tmp_path / "told.safetensors"
    save_file(tensors, path, metadata={"ss_tag_frequency": "a secret"})
    assert "a secret" not in inspect(path)[1]
    assert "a secret" in inspect(path, "export.prompts=true")[1]


@pytest.mark.parametrize(
    ("words", "code"), [(["--help"], 0), ([], 2), (["-m"], 2), (["file", "--cfg", "job"], 2)]
)
def test_the_command_says_how_it_is_used(words, code):
    command = [sys.executable, "-m", "stages.inspect", *words]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    assert done.returncode == code
    assert "python -m stages.inspect FILE" in (done.stderr if code else done.stdout)
