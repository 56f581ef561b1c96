"""Which reductions of a compiled block keep their rows in registers."""

from types import SimpleNamespace

import pytest
from sympy import Integer
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from lib.reductions import LONGEST, WholeRows


@pytest.fixture
def sizes():
    """A graph whose sizes are all known."""
    known = SimpleNamespace(
        statically_known_leq=lambda size, most: size <= most,
        optimization_hint=lambda size: size,
    )
    with V.set_graph_handler(SimpleNamespace(sizevars=known)):
        yield


def asked(choices, length, hint=ReductionHint.INNER, *, cooperative=False):
    features = SimpleNamespace(
        get_reduction_hint=lambda: hint, reduction_numel=Integer(length), numel=Integer(length)
    )
    return bool(choices.should_use_persistent_reduction(features, cooperative))


@pytest.mark.parametrize("length", [3072, 6144, LONGEST])
def test_a_token_s_numbers_are_kept(sizes, length):
    assert asked(WholeRows, length)
    assert not asked(InductorChoices, length)


@pytest.mark.parametrize(
    ("length", "hint", "cooperative"),
    [
        (64, ReductionHint.INNER, False),
        (LONGEST + 1, ReductionHint.INNER, False),
        (3072, ReductionHint.OUTER, False),
        (32, ReductionHint.OUTER_TINY, False),
        (3072, ReductionHint.INNER, True),
    ],
)
def test_all_else_is_the_compiler_s_own_choice(sizes, length, hint, cooperative):
    given = (length, hint)
    own = asked(InductorChoices, *given, cooperative=cooperative)
    assert asked(WholeRows, *given, cooperative=cooperative) == own


def test_kept_blocks_are_told_from_those_of_other_choices():
    assert WholeRows().uuid()
