"""The MLflow mirror: a thread follows a run's events into MLflow; training never waits for it."""

from lib.tracking.follower import close_parent, following, parent_run, send_pending
from lib.tracking.mirror import replay_pending

__all__ = ["close_parent", "following", "parent_run", "replay_pending", "send_pending"]
