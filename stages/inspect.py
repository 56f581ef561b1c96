"""What an adapter file holds, anyone's: its family, how far it changes what, what is wrong with it.

With `family.base=...` also whether it fits that base, by names and sizes; no weight of a base is
read, a pickle is never opened, nothing is written. Exit code 0 when all is well, 3 when not.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lib.errors import InputRefused, Problem
from lib.files import user_path
from lib.schema import TINY, Config
from stages import Job, main
from stages.summary import Summary

if TYPE_CHECKING:
    from lib.family import Family
    from lib.hub import Base

WRONG, USAGE = 3, 2


def looking_at(file: str, given: Sequence[str]) -> Job:
    """The job for one file; `given` are the settings that a user wrote."""
    named = {word.split("=")[0] for word in given}

    def look(config: Config, _summary: Summary) -> int:
        from lib import families
        from lib.findings import Findings
        from lib.hub import on_hub
        from lib.inspecting import inspect_file
        from lib.likeness import fit, likely

        found = inspect_file(user_path(file))
        every = {name: families.get(name) for name in families.names()}
        guess = likely(found, every)
        family = families.get(config.family.name) if {"family", "family.name"} & named else None
        findings = Findings(found, guess, family.FACTS.name if family else None)
        if "family.base" in named or (family and not on_hub(config.family.base)):
            base, family = _base(config, family, guess.families, every)
            fitted = fit(found, family, base.outline(family.FACTS.denoiser))
            findings = Findings(found, guess, family.FACTS.name, config.family.base, fitted)
        print("\n".join(findings.lines(private=config.export.prompts)))
        return WRONG if findings.faults else 0

    return look


def _base(
    config: Config, family: "Family | None", guess: Sequence[str], every: Mapping[str, "Family"]
) -> "tuple[Base, Family]":
    """The base to compare with and its family: the given one, else the base's own."""
    from lib.fitting import family_of, index_problems
    from lib.hub import open_base
    from lib.memory import Memory

    if family is None and config.family.base == TINY and len(guess) != 1:
        why, allowed = "there is one for each family", ", ".join(guess or every)
        raise InputRefused(Problem("family.base=tiny", why, allowed, "add family=..."))
    facts, store = {name: one.FACTS for name, one in every.items()}, user_path(config.paths.store)
    any_family = family or every[guess[0] if guess else config.family.name]
    base = open_base(config.family, family=any_family, store=store, memory=Memory(store))
    of_base = family_of(base, facts)
    family = family or (every[of_base] if of_base else any_family)
    if problems := list(index_problems(base, family=family, others=facts)):
        raise InputRefused(problems)
    return base, family


if __name__ == "__main__":
    words = sys.argv[1:]
    usage = f"python -m stages.inspect FILE [family=... family.base=...]\n{__doc__}".rstrip()
    if {"-h", "--help"} & set(words):
        print(usage)
        sys.exit(0)
    if not words or any(word.startswith("-") for word in words):
        why = "it takes no flags" if words else "which file?"
        print(f"refused: {why} {usage.splitlines()[0]}", file=sys.stderr)
        sys.exit(USAGE)
    main(looking_at(words[0], words[1:]), arguments=words[1:], opens_base=False)
