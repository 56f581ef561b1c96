"""What lies beside an adapter: front matter that is YAML, the base's licence, and no prompt unasked."""

import dataclasses
import json

import pytest
import yaml
from PIL import Image

from lib import cards, families
from lib.families import flux, sdxl
from lib.schema import Config, DatasetConfig, ExportConfig

SECRET = "a photo of my sister"


def config_of(*, trigger=None, format="diffusers"):
    dataset = DatasetConfig(trigger=trigger, instance_prompt=SECRET, root="/pictures/my-sister")
    return dataclasses.replace(Config(), dataset=dataset, export=ExportConfig(format=format))


def about_of(family=flux, *, base="reference", private=None, name="cat", settings=None, **given):
    return cards.About(
        name=name,
        facts=family.FACTS,
        base=family.FACTS.reference if base == "reference" else base,
        revision="0123456789abcdef" if base else None,
        config=config_of(**given),
        steps=500,
        digests={"manifest": "a" * 64, "train": "b" * 64},
        settings={"total_steps": 500} if settings is None else settings,
        private=private or {},
    )


MADE = {"adapter": "cat.safetensors", "ema": "ema/cat-ema.safetensors"}


@pytest.fixture
def card(tmp_path):
    """Writes a card; its front matter, read as the Hub reads it, and its text."""

    def write(*given, **options):
        cards.write_card(about_of(*given, **options), tmp_path, made=MADE)
        text = (tmp_path / cards.CARD).read_text(encoding="utf-8")
        _, front, body = text.split("---\n", 2)
        return yaml.safe_load(front), body

    return write


@pytest.mark.parametrize("name", families.names())
def test_front_matter_is_yaml_that_names_base_library_and_family(card, name):
    front, _ = card(families.get(name))
    facts = families.get(name).FACTS
    assert front["base_model"] == facts.reference
    assert front["base_model_relation"] == "adapter"
    assert front["library_name"] == "diffusers"
    assert {"lora", "text-to-image", name} <= set(front["tags"])


def test_the_licence_is_that_of_the_base_it_was_trained_on(card):
    assert sdxl.FACTS.license
    assert card(sdxl)[0]["license"] == sdxl.FACTS.license
    assert "license_name" not in card(sdxl)[0]


@pytest.mark.parametrize("family", [flux, sdxl])
def test_of_another_base_the_licence_is_not_guessed(card, family):
    front, _ = card(family, base="someone/fine-tuned")
    assert (front["license"], front["license_name"]) == ("other", "that-of-the-base")
    assert front["license_link"] == "https://huggingface.co/someone/fine-tuned"


def test_a_base_on_this_machine_has_no_name_and_no_link(card):
    front, body = card(base=None)
    assert front["license"] == "other"
    assert not {"base_model", "base_model_relation", "license_link"} & front.keys()
    assert 'from_pretrained("<the base>")' in body


def test_the_trigger_is_told_and_not_made_up(card):
    assert "Begin a prompt with `sks`." in card(trigger="sks")[1]
    assert "Begin a prompt" not in card()[1]


def test_no_prompt_and_no_folder_is_told_unasked(card, tmp_path):
    about = about_of(trigger="sks")
    front, body = card(trigger="sks")
    cards.write_sidecar(about, tmp_path / "cat.safetensors", adapter="adapter")
    told = [str(front), body, (tmp_path / "cat.json").read_text()]
    told.append(str(cards.header(about, adapter="adapter")))
    assert not [text for text in told if SECRET in text or "my-sister" in text]


def test_a_prompt_that_is_asked_for_is_in_all_of_them(card, tmp_path):
    private = {"instance_prompt": SECRET, "dataset": "my-sister"}
    about = about_of(private=private)
    cards.write_sidecar(about, tmp_path / "cat.safetensors", adapter="adapter")
    assert card(private=private)[0]["instance_prompt"] == SECRET
    assert json.loads((tmp_path / "cat.json").read_text())["instance_prompt"] == SECRET
    assert cards.header(about, adapter="adapter")["instance_prompt"] == SECRET


@pytest.mark.parametrize(
    "text", ['": [x', "a: b # c", "---\nlicense: mit", "\u00e9\u2028\t", "- *x"]
)
def test_no_prompt_breaks_the_front_matter(card, text):
    front, _ = card(private={"instance_prompt": text})
    assert front["instance_prompt"] == text
    assert front["license"] == "other"


def test_a_header_is_texts_only_and_holds_nothing_empty():
    told = cards.header(about_of(base=None), adapter="ema")
    assert all(isinstance(text, str) and text for text in told.values())
    assert (told["adapter"], told["base"], told["steps"]) == ("ema", "local", "500")
    assert told["train_key"] == "b" * 64
    assert not {"revision", "trigger"} & told.keys()


@pytest.mark.parametrize(
    ("format", "words", "absent"),
    [
        ("diffusers", ["load_lora_weights"], ["ComfyUI", "kohya"]),
        ("kohya", ["load_lora_weights", "kohya"], ["ComfyUI"]),
        ("comfyui", ["models/loras"], ["load_lora_weights"]),
    ],
)
def test_each_format_says_how_it_is_loaded(card, format, words, absent):
    _, body = card(format=format)
    assert all(word in body for word in words)
    assert not [word for word in absent if word in body]
    assert all(file in body for file in MADE.values())


def test_a_setting_ends_no_cell_of_the_table(card):
    _, body = card(settings={"adapter.targets": ["to_q", "to_k"], "odd": "a|b\nc"})
    assert "| `adapter.targets` | to_q, to_k |" in body
    assert "| `odd` | a\\|b c |" in body


def test_a_grid_is_put_into_the_card_with_its_prompts_when_given(card, tmp_path):
    card()
    cards.add_grid(tmp_path, Image.new("RGB", (8, 8)), prompts=["a cat | two\nlines"])
    text = (tmp_path / cards.CARD).read_text()
    assert f"]({cards.GRID})\n\n- a cat \\| two lines" in text
    assert "<!-- samples -->" not in text
    assert (tmp_path / cards.GRID).is_file()


def test_a_card_that_somebody_took_away_stays_away(tmp_path):
    cards.add_grid(tmp_path, Image.new("RGB", (8, 8)))
    assert list(tmp_path.iterdir()) == []
