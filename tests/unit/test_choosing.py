"""The way of running that a GPU's free memory allows, and the reason that is told."""

import pytest
import torch

from lib import choosing, families
from lib.footprint import GIB, Footprint, Way, Work, footprint
from lib.pipeline.budget import WAYS
from tests.unit import full_size

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ALL = ("bf16", "fp8", "int8", "nf4")


def flux(*, compiled):
    """What FLUX.1 needs at 512 px: 29.8 GiB in bf16 and fp8, 21.9 in int8, 18.0 in nf4."""
    facts, config = families.get("flux").FACTS, full_size.denoiser_of("flux").config
    weights, work = full_size.weights_of("flux"), Work(512, 512, 512, 1)
    return {
        way: footprint(weights, facts.costs, config, work, way, compiled=compiled) for way in WAYS
    }


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with so much free that can compute all but what is named, with the reasons."""

    def made(gib, **faults):
        monkeypatch.setattr(choosing, "free_bytes", lambda device: int(gib * GIB))
        monkeypatch.setattr(choosing, "fault_of", lambda mode, device: faults.get(mode, ""))
        return GPU

    return made


def chosen(device, *, allowed=ALL, **options):
    return choosing.choose(flux, device, allowed=allowed, compiled=True, **options)


# A tenth and one GiB are kept back: fp8 asks for 33.8, int8 for 25.1, nf4 for 20.8, bf16 again for
# 27.1, int8 again for 18.4, nf4 again for 14.2 GiB.
FITS = [
    (141, Way("fp8", False)),
    (40, Way("fp8", False)),
    (30, Way("int8", False)),  # faster than nf4, which would fit too
    (24, Way("nf4", False)),  # faster than int8 again
    (20, Way("int8", True)),
    (16, Way("nf4", True)),
]


@pytest.mark.parametrize(("gib", "way"), FITS)
def test_the_fastest_way_that_fits_is_taken(gpu, gib, way):
    choice = chosen(gpu(gib))
    assert (choice.way, choice.refused) == (way, False)
    assert "the fastest that fits" in choice.reason
    assert f"of {gib:.1f} GiB free" in choice.reason


def test_where_none_fits_for_sure_the_least_is_tried(gpu):
    """11.9 GiB are foreseen: 12 may do."""
    choice = chosen(gpu(12))
    assert (choice.way, choice.refused) == (Way("nf4", True), False)
    assert "none fits for sure" in choice.reason


def test_where_not_even_the_least_can_fit_it_is_refused(gpu):
    choice = chosen(gpu(8))
    assert choice.refused
    assert "11.9 GiB of 8.0 GiB free" in choice.reason


def test_more_memory_never_means_a_slower_way(gpu):
    places = [choosing.FASTEST.index(chosen(gpu(gib)).way) for gib in range(12, 60)]
    assert places == sorted(places, reverse=True)
    assert len(set(places)) > 2


def test_each_faster_way_is_told_with_its_reason(gpu):
    reason = chosen(gpu(30, fp8="needs an Ada GPU")).reason
    assert "fp8: needs an Ada GPU" in reason
    assert "bf16 needs 29.8 GiB" in reason
    assert "nf4" not in reason  # which is slower than what is taken
    told = chosen(gpu(24), allowed=("bf16", "nf4")).reason
    assert "fp8: not shown to train this family as bf16 does" in told


def test_every_faster_way_is_told_once(gpu):
    choice = chosen(gpu(16))
    before = choosing.FASTEST[: choosing.FASTEST.index(choice.way)]
    told = choice.reason.split("; ")[1:]
    assert [text.split(" needs ")[0] for text in told] == [str(way) for way in before]
    unable = chosen(gpu(20, nf4="no units"))
    assert unable.way == Way("int8", True)
    assert unable.reason.count("nf4") == 1  # with checkpointing it is no less unable


@pytest.mark.parametrize("mode", ALL)
def test_what_a_family_or_a_gpu_does_not_allow_is_not_taken(gpu, mode):
    others = [other for other in ALL if other != mode]
    for device, allowed in ((gpu(141), others), (gpu(141, **{mode: "a fault"}), ALL)):
        assert chosen(device, allowed=allowed).way.mode != mode


def test_what_is_asked_of_checkpointing_is_heeded(gpu):
    assert chosen(gpu(16), checkpointing="never").way == Way("nf4", False)
    assert chosen(gpu(24), checkpointing="never").way == Way("nf4", False)
    assert chosen(gpu(141), checkpointing="always").way == Way("bf16", True)
    assert chosen(gpu(16), checkpointing="always").way == Way("nf4", True)


def test_without_a_gpu_or_its_units_it_is_fp32(gpu):
    assert chosen(CPU).way == Way("fp32", False)
    none = gpu(141, **dict.fromkeys(ALL, "none such"))
    assert chosen(none).way == Way("fp32", False)


def test_what_the_process_holds_and_does_not_use_counts_as_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    assert choosing.free_bytes(GPU) == 5 + 40 - 10


@pytest.mark.parametrize(("capability", "able"), [((7, 5), False), ((8, 0), True)])
def test_a_gpu_without_bfloat16_units_computes_fp32_alone(monkeypatch, capability, able):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (choosing.fault_of("bf16", GPU) == "") is able
    assert choosing.fault_of("fp32", GPU) == ""
    assert choosing.fault_of("bf16", CPU) == ""


def again(device, *, mode="bf16", compiled=True):
    return choosing.checkpointing(flux, device, mode=mode, compiled=compiled)


def peak_of(blocks, *, mode="bf16"):
    """With so many blocks computed again."""
    needed = flux(compiled=True)[Way(mode, False)]
    return needed.peak - blocks * needed.saving


def fits(peak, gib):
    return choosing.fits(Footprint(peak, 0, 0, 0), int(gib * GIB))


# bf16 asks for 33.8 GiB, with all blocks again for 27.1.
SOME = [27.5, 28, 29, 30, 31, 32, 33, 33.5]


@pytest.mark.parametrize("gib", SOME)
def test_as_few_blocks_as_make_it_fit_are_computed_again(gpu, gib):
    choice = again(gpu(gib))
    assert choice.way == Way("bf16", True)
    assert choice.blocks is not None
    assert fits(peak_of(choice.blocks), gib)
    assert not fits(peak_of(choice.blocks - 1), gib)
    assert f"{choice.blocks} of 57 blocks" in choice.reason


def test_more_memory_never_means_more_blocks(gpu):
    counts = [again(gpu(gib)).blocks for gib in SOME]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)


@pytest.mark.parametrize("mode", ALL)
def test_nothing_is_computed_again_where_all_fits(gpu, mode):
    choice = again(gpu(36), mode=mode)
    assert (choice.way, choice.blocks) == (Way(mode, False), None)
    assert "fits without" in choice.reason


def test_all_is_computed_again_where_that_does_not_surely_fit_either(gpu):
    choice = again(gpu(20))
    assert (choice.way, choice.blocks) == (Way("bf16", True), None)
    assert "nor is it sure" in choice.reason


def test_on_a_cpu_nothing_is_computed_again():
    choice = again(CPU)
    assert choice.way == Way("bf16", False)
    assert "no GPU" in choice.reason


def test_a_denoiser_without_a_list_of_blocks_is_computed_again_as_a_whole(gpu):
    def needs(*, compiled):
        keeping = Footprint(weights=GIB, adapter=0, kept=10 * GIB, passing=0, blocks=0, saving=GIB)
        whole = Footprint(weights=GIB, adapter=0, kept=GIB, passing=0)
        return {Way("bf16", False): keeping, Way("bf16", True): whole}

    choice = choosing.checkpointing(needs, gpu(8), mode="bf16", compiled=True)
    assert (choice.way, choice.blocks) == (Way("bf16", True), None)
    assert "all computed again" in choice.reason
