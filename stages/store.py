"""Looking after the store: `verify` checks every digest, `gc` frees space, `stats` counts."""

import sys
import time

from lib.files import user_path
from lib.schema import Config
from lib.store import Store
from stages import main
from stages.summary import Summary

ACTIONS = ("verify", "gc", "stats")
GRACE_SECONDS = 2.0
DAMAGE, USAGE = 3, 2


def verify(config: Config, _summary: Summary) -> int:
    """Exit code 0 when everything is whole, 3 when something is damaged or missing."""
    from lib.events import Events
    from lib.upkeep import verify as check
    from stages.console import console

    with console() as sink:
        events = Events(sinks=(sink,), stage="store verify")
        report = check(
            _store(config), threads=4, progress=lambda d, t: events.progress(d, t, unit="entries")
        )
    for damage in report.damaged:
        print(f"damaged: {damage.path}: {damage.why}")
    for missing in report.missing:
        print(f"missing: {missing.ref.kind}/{missing.ref.key}, named by {missing.manifest}")
    for path in report.stray:
        print(f"stray: {path}")
    counts = f"{len(report.damaged)} damaged, {len(report.missing)} missing"
    print(f"{report.checked} checked, {counts}, {len(report.stray)} stray")
    if report.damaged or report.missing:
        print("the next run sets damaged entries aside and makes them again")
        return DAMAGE
    return 0


def gc(config: Config, _summary: Summary) -> int:
    """Remove what no existing run, no recent use and no live builder reaches."""
    from lib.upkeep import gc as collect

    report = collect(
        _store(config),
        keep_days=config.gc.keep_days,
        now=time.time(),
        grace_seconds=GRACE_SECONDS,
        dry_run=False,
    )
    print(f"{len(report.removed)} removed, {report.freed_bytes} bytes freed, {report.kept} kept")
    return 0


def stats(config: Config, _summary: Summary) -> int:
    """Entries and bytes by kind, manifests by stage."""
    from lib.upkeep import stats as count

    found = count(_store(config))
    for kind, of_kind in found.kinds.items():
        print(f"{kind:<20} {of_kind.count:>8} entries  {of_kind.size_bytes:>14} bytes")
    for stage, number in found.manifests.items():
        print(f"{stage:<20} {number:>8} manifests")
    return 0


def _store(config: Config) -> Store:
    return Store(user_path(config.paths.store))


if __name__ == "__main__":
    action = sys.argv[1] if len(sys.argv) > 1 else ""
    if action in ("-h", "--help"):
        print(f"python -m stages.store {'|'.join(ACTIONS)} [setting=value ...]\n{__doc__}")
        sys.exit(0)
    if action not in ACTIONS:
        allowed = ", ".join(ACTIONS)
        print(f"refused: store {action}: unknown action; allowed: {allowed}", file=sys.stderr)
        sys.exit(USAGE)
    job = {"verify": verify, "gc": gc, "stats": stats}[action]
    main(job, arguments=sys.argv[2:], opens_base=False)
