"""What is sent again after a stop, a loss or a later stage: all of it, each thing once."""

import json
import shutil

import pytest

from lib.tracking.journal import Journal, TrackerFailed, read_chunk
from lib.tracking.mirror import Mirror, alone, replay_pending
from lib.tracking.server import Server


def test_events_that_come_while_some_are_sent_wait_for_the_next_round(
    make_run, metrics, append, server, monkeypatch
):
    """A run with quick steps would otherwise never leave the mirror a pause."""
    folder = make_run(*metrics(*range(1, 100)))
    mirror = Mirror(folder, server, Journal(folder))
    log, steps = Server.log, iter(range(100, 200))

    def log_while_the_run_goes_on(self, *args):
        append(folder, *metrics(next(steps)))
        log(self, *args)

    monkeypatch.setattr(Server, "log", log_while_the_run_goes_on)
    assert [mirror.advance(), mirror.advance()] == [True, False]
    assert mirror.advance() is False
    assert server.last_steps(mirror.run_id)["loss"] == 101


def test_a_torn_line_is_counted_and_one_being_written_is_waited_for(
    make_run, send, history, metrics, append
):
    folder = make_run()
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"kind": "met')
    assert history(send(folder)) == []
    append(folder, *metrics(1, 2))
    run = send(folder)
    assert [point[0] for point in history(run)] == [2]
    assert run.data.tags["unreadable_lines"] == "1"


@pytest.mark.parametrize("lost", ["offset", "run", "record"])
def test_what_was_accepted_but_not_noted_does_not_appear_twice(
    make_run, send, history, runs_of, lost, event, metrics, append
):
    folder = make_run(*metrics(*range(1, 200)), event("warning", 1300.0, text="w"))
    first = history(send(folder))
    journal = Journal(folder)
    if lost == "offset":
        journal.update(offset=0, warnings=0, sent=False)
    elif lost == "run":  # the answer to the creating call was lost
        journal.update(run_id=None)
    else:  # half of what was sent was noted
        journal.update(offset=read_chunk(folder, 0).end, warnings=0, sent=False)
    append(folder, *metrics(200))
    run = send(folder)
    assert len(runs_of()) == 1
    assert history(run) == [*first, (200, 1 / 200, 1200000)]
    assert run.data.tags["warnings"] == "1"


def test_a_resumed_run_is_the_same_run_with_each_step_once(
    make_run, send, history, runs_of, event, metrics, append
):
    folder = make_run(*metrics(1, 2, 3, 4, 5))
    assert send(folder, status="KILLED").info.status == "KILLED"
    resumed = event("decision", 1010.0, name="resume", value=4, reason="an earlier attempt")
    append(folder, resumed, *metrics(5, 6, at=1010.0))
    run = send(folder)
    assert [run.info.run_id] == [one.info.run_id for one in runs_of()]
    assert run.info.status == "FINISHED"
    assert [point[0] for point in history(run)] == [1, 2, 3, 4, 5, 6]
    assert run.data.tags["decision.resume"].startswith("4 ")


def test_a_step_that_is_repeated_before_it_was_sent_is_there_once(make_run, send, history, metrics):
    again = [{**one, "loss": 9.0} for one in metrics(3, 4, at=1010.0)]
    run = send(make_run(*metrics(1, 2, 3), *again))
    assert [point[:2] for point in history(run)] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 9.0)]


@pytest.mark.parametrize("harm", ["removed there", "another store"])
def test_a_run_that_is_gone_is_sent_whole_as_a_new_one(
    make_run, send, history, server, runs_of, harm, event, metrics
):
    folder = make_run(*metrics(1, 2), event("warning", 1300.0, text="w"))
    first = send(folder)
    if harm == "removed there":
        server._client.delete_run(first.info.run_id)
    else:
        Journal(folder).update(store="another", run_id="unknown")
    second = send(folder)
    assert second.info.run_id != first.info.run_id
    assert [point[0] for point in history(second)] == [1, 2]
    assert second.data.tags["warnings"] == "1"


def test_a_replay_sends_what_is_missing_and_nothing_else(
    make_run, send, server, outputs, runs_of, event, metrics, append
):
    complete, dead = make_run(*metrics(1), name="complete"), make_run(*metrics(1, 2), name="dead")
    make_run(name="untracked")
    grown = make_run(*metrics(1), name="grown")
    send(complete)
    send(grown)
    Journal(dead).update(status="RUNNING")
    append(grown, event("phase", 1400.0, status="done"))
    assert replay_pending(outputs, server) == 2
    assert replay_pending(outputs, server) == 0
    found = {run.info.run_name: run for run in runs_of()}
    assert {name: run.info.status for name, run in found.items()} == {
        "complete": "FINISHED",
        "dead": "KILLED",
        "grown": "FINISHED",
    }
    assert found["grown"].data.tags["phase.train"] == "done"
    assert found["dead"].data.metrics["loss"] == 0.5


def test_a_file_that_came_later_is_sent_by_a_replay_and_the_others_are_not_again(
    make_run, send, server, outputs, monkeypatch
):
    """A later process writes no event of the run: the picture itself says that it is missing."""
    folder = make_run()
    send(folder)
    (folder / "samples/grid-2.png").write_bytes(b"later")
    names, upload = [], Server.upload

    def noting(self, run_id, path, *, name):
        names.append(name)
        upload(self, run_id, path, name=name)

    monkeypatch.setattr(Server, "upload", noting)
    assert replay_pending(outputs, server) == 1
    assert names == ["samples/grid-2.png"]
    run_id = Journal(folder).progress.run_id
    found = {file.path for file in server._client.list_artifacts(run_id, "samples")}
    assert found == {"samples/grid.png", "samples/grid-2.png"}
    assert server._client.get_run(run_id).info.status == "FINISHED"
    assert replay_pending(outputs, server) == 0


def test_a_run_that_is_sent_as_a_new_one_has_all_its_files(make_run, send, server):
    folder = make_run()
    server._client.delete_run(send(folder).info.run_id)
    run = send(folder)
    found = {file.path for file in server._client.list_artifacts(run.info.run_id, "samples")}
    assert found == {"samples/grid.png"}


def test_a_record_that_names_no_files_yet_is_read(make_run, send):
    folder = make_run()
    run = send(folder)
    path = folder / "tracking.json"
    record = json.loads(path.read_text())
    del record["artifacts"]
    path.write_text(json.dumps(record))
    assert send(folder).info.run_id == run.info.run_id


def test_a_replay_leaves_what_is_followed_or_belongs_elsewhere(make_run, server, outputs, runs_of):
    followed, elsewhere = make_run(name="followed"), make_run(name="elsewhere")
    Journal(followed).update(status="RUNNING")
    Journal(elsewhere).update(status="FINISHED", run_id="theirs", store="another")
    with alone(followed) as free:
        assert free
        assert replay_pending(outputs, server) == 0
    assert runs_of() == []
    assert replay_pending(outputs, server) == 1


def test_a_damaged_record_is_named_and_does_not_stop_the_others(make_run, server, outputs, runs_of):
    damaged, sound = make_run(name="a"), make_run(name="b")
    (damaged / "tracking.json").write_text("{", encoding="utf-8")
    Journal(sound).update(status="FINISHED")
    with pytest.raises(TrackerFailed, match=r"a/tracking\.json"):
        replay_pending(outputs, server)
    assert [run.info.run_name for run in runs_of()] == ["b"]


def test_a_stopped_replay_goes_on_later(make_run, server, outputs, history, runs_of, metrics):
    folder = make_run(*metrics(*range(1, 300)))
    Journal(folder).update(status="FINISHED")
    answers = iter([False, True])
    assert replay_pending(outputs, server, stopped=lambda: next(answers)) == 0
    (run,) = runs_of()
    assert 0 < len(history(run)) < 299
    assert run.info.status == "RUNNING"
    assert replay_pending(outputs, server) == 1
    assert len(history(run)) == 299


def test_events_that_begin_anew_are_read_from_their_beginning(
    make_run, send, history, metrics, append
):
    folder = make_run(*metrics(*range(1, 50)))
    send(folder)
    (folder / "events.jsonl").unlink()
    append(folder, *metrics(50))
    assert [point[0] for point in history(send(folder))] == list(range(1, 51))
    (folder / "events.jsonl").unlink()
    assert len(history(send(folder))) == 50


def test_a_copied_folder_does_not_need_the_process_that_made_it(
    make_run, send, outputs, history, metrics
):
    """Everything that is sent lies in the folder."""
    folder = make_run(*metrics(1, 2))
    shutil.move(folder, outputs / "moved")
    assert [point[0] for point in history(send(outputs / "moved"))] == [1, 2]
