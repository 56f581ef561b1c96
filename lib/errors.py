"""The exceptions a caller may catch; each carries its exit code and all problems at once."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

# A password may hold any sign, so all up to the word's last "@" goes.
_LOGIN = re.compile(r"""(?<=://)[^\s/'"][^\s'"]*@""")
_QUERY = re.compile(r"""([?&][^=&\s]*(?:pass|pwd|token|secret|key)[^=&\s]*=)[^&\s'"]+""", re.I)


def without_credentials(text: str) -> str:
    """A text whose addresses show no login: what stands before "@", and secrets in a query."""
    return _QUERY.sub(r"\1[hidden]", _LOGIN.sub("", text))


@dataclass(frozen=True, order=True)
class Problem:
    """One thing a user can mend: `subject` is `setting=value` or a file's name."""

    subject: str
    why: str
    allowed: str = ""
    remedy: str = ""

    def __post_init__(self):
        # Reports are printed, logged and pasted into issues; a value in one may be an address.
        for name in ("subject", "why", "allowed", "remedy"):
            object.__setattr__(self, name, without_credentials(getattr(self, name)))

    def __str__(self) -> str:
        allowed = f"allowed: {self.allowed}" if self.allowed else ""
        return f"{self.subject}: " + "; ".join(
            part for part in (self.why, allowed, self.remedy) if part
        )


class DarkroomError(Exception):
    """Base of all errors a user can cause; `exit_code` is the process's (design 9).

    `of_all`: of several processes on one run each has it, so that the first may say it for all.
    """

    exit_code = 1
    of_all = False

    def __init__(self, problems: Problem | Iterable[Problem]):
        items = [problems] if isinstance(problems, Problem) else problems
        self.problems: tuple[Problem, ...] = tuple(sorted(set(items)))
        super().__init__("\n".join(map(str, self.problems)))


class InputRefused(DarkroomError):
    """A setting, a file or a base that cannot be used."""

    exit_code = 2
    of_all = True


class SamplesFailed(DarkroomError):
    """Some samples or entries failed; the others were tried and kept."""

    exit_code = 3


class StateRefused(DarkroomError):
    """The state of the store or of a run forbids it: running elsewhere, upstream missing."""

    exit_code = 4
    of_all = True


class Stopped(KeyboardInterrupt):
    """Stopped on request. No `Exception`: nothing that rescues an attempt may rescue this.

    `by` names what asked, without any path; `of_all`: every process of the run has agreed to it.
    """

    exit_code = 75

    def __init__(self, text: str, *, by: str, of_all: bool = False):
        super().__init__(without_credentials(text))
        self.by = by
        self.of_all = of_all
