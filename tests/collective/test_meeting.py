"""Meetings of real processes that are killed, stopped and started again."""

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ndistribute.collective.meeting import Meetings
from ndistribute.collective.membership import Elastic, WorkerReport
from ndistribute.errors import CollectiveTimeoutError, WorkerLostError
from tests.jobs import meetings as job
from tests.processes import Outcome, Ranks, free_addresses, wait_until

SHORT = {"NDISTRIBUTE_HEARTBEAT_SECONDS": "1"}


class Workers:
    """Processes with addresses in one job; a later process may have the address of a lost one."""

    def __init__(self, ranks: Ranks, size: int, *limits: Any) -> None:
        self.ranks, self.limits = ranks, limits
        self.addresses = free_addresses({"worker": size})["worker"]
        self.started = 0

    def start(self, *indices: int) -> list[bool]:
        """Start workers at these places; return whether each one sees a job that runs."""
        seen = []
        for index in indices:
            what = job.begin, self.addresses, index, *self.limits
            seen += [each.result() for each in self.ranks.run(*what, ranks=[self.started])]
            self.started += 1
        return seen

    def form(self, *ranks: int, **more: Any) -> list[dict[str, Any]]:
        """Let workers meet, form their group and leave it; return what was planned."""
        plans = results(self.ranks.run(job.meet, ranks=ranks, **more))
        self.establish(*ranks)
        return plans

    def establish(self, *ranks: int) -> None:
        assert len({*results(self.ranks.run(job.form, ranks=ranks))}) == 1
        results(self.ranks.run(job.part, ranks=ranks))

    def stat(self, rank: int) -> Path:
        return Path(f"/proc/{self.ranks.pids[rank]}/stat")

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks.end(rank)

    def stop(self, rank: int) -> None:
        self.ranks.signal(rank, signal.SIGSTOP)
        wait_until(lambda: state(self.stat(rank)) == "T")


def state(stat: Path) -> str:
    with contextlib.suppress(OSError):
        return stat.read_text().rpartition(")")[2].split()[0]
    return "X"


def results(outcomes: Sequence[Outcome]) -> list[Any]:
    return [each.result() for each in outcomes]


def tasks(plans: Sequence[dict[str, Any]]) -> list[int]:
    """Return the indices of the workers of a plan, which all must have got."""
    assert len({(each["number"], *each["tasks"]) for each in plans}) == 1
    assert [each["rank"] for each in plans] == sorted(each["rank"] for each in plans)
    return [int(name.removeprefix("worker:")) for name in plans[0]["tasks"]]


def listening_at(address: str) -> socket.socket:
    """Return a socket as a launcher holds it, which nobody serves."""
    host, port = address.split(":")
    return socket.create_server((host, int(port)))


@contextlib.contextmanager
def workers(
    count: int, size: int, *limits: Any, environ: dict[str, str] | None = None
) -> Iterator[Workers]:
    with Ranks(count, environ=environ or {}) as ranks:
        made = Workers(ranks, size, *limits)
        yield made
        alive = [r for r in range(made.started) if state(made.stat(r)) not in "ZX"]
        assert results(ranks.run(job.end, ranks=alive)) == [1] * len(alive)


def test_workers_form_groups_without_those_who_were_killed():
    with workers(4, 4) as made:
        assert made.start(0, 1, 2, 3) == [False] * 4
        plans = made.form(0, 1, 2, 3)
        assert tasks(plans) == [0, 1, 2, 3]
        assert plans[0]["number"] == 1
        made.kill(0)
        plans = made.form(1, 2, 3)
        assert tasks(plans) == [1, 2, 3]
        assert plans[0]["number"] == 2
        made.kill(1, 3)  # Most of them, and the lowest rank.
        assert tasks(made.form(2)) == [2]


def test_a_worker_that_computes_is_waited_for():
    with workers(3, 3) as made:
        made.start(0, 1, 2)
        made.form(0, 1, 2)
        made.ranks.start(job.meet, ranks=[1, 2])
        assert made.ranks.run(job.gathered, 2, ranks=[0])[0].result() == 2
        plans = results(made.ranks.run(job.meet, ranks=[0]))
        assert tasks([*plans, *results(made.ranks.collect(ranks=[1, 2]))]) == [0, 1, 2]
        assert plans[0]["seconds"] < 1.0
        made.establish(0, 1, 2)


def test_the_first_worker_may_start_last():
    with workers(3, 3) as made:
        made.start(2, 1)
        made.ranks.start(job.meet, 5, ranks=[0, 1])
        made.start(0)
        plans = results(made.ranks.run(job.meet, 7, ranks=[2]))
        assert plans[0]["units"] == [7, 5, 5]
        assert tasks([*plans, *results(made.ranks.collect(ranks=[1, 0]))]) == [0, 1, 2]
        made.establish(0, 1, 2)


def test_who_dies_while_it_waits_is_not_in_the_plan():
    with workers(4, 4) as made:
        made.start(0, 1, 2, 3)
        made.form(0, 1, 2, 3)
        made.ranks.start(job.meet, ranks=[0, 1, 2])
        assert made.ranks.run(job.gathered, 0, ranks=[3])
        made.kill(2)
        made.ranks.start(job.meet, ranks=[3])
        assert tasks(results(made.ranks.collect(ranks=[0, 1, 3]))) == [0, 1, 3]
        made.establish(0, 1, 3)


def test_the_next_one_coordinates_when_the_coordinator_dies():
    with workers(4, 4) as made:
        made.start(0, 1, 2, 3)
        made.form(0, 1, 2, 3)
        made.ranks.start(job.meet, ranks=[1, 2])
        assert made.ranks.run(job.gathered, 2, ranks=[0])[0].result() == 2
        made.kill(0)
        assert made.ranks.run(job.gathered, 0, ranks=[3])
        made.ranks.start(job.meet, ranks=[3])
        assert tasks(results(made.ranks.collect(ranks=[1, 2, 3]))) == [1, 2, 3]
        made.establish(1, 2, 3)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_they_meet_again_if_a_member_dies_before_the_group_has_formed(victim: int):
    others = [rank for rank in range(4) if rank != victim]
    with workers(4, 4) as made:
        made.start(0, 1, 2, 3)
        made.form(0, 1, 2, 3)
        listening = results(made.ranks.run(job.sockets, ranks=others))
        results(made.ranks.run(job.meet, ranks=range(4)))
        made.kill(victim)
        for rank in others:
            failed = made.ranks.run(job.still_there, ranks=[rank])[0]
            assert (failed.error, failed.text) == (
                "WorkerLostError",
                f"worker:{victim} was lost before the group formed.",
            )
        results(made.ranks.run(job.part, ranks=others))
        plans = made.form(*others)
        assert tasks(plans) == others
        assert plans[0]["number"] == 3
        assert results(made.ranks.run(job.sockets, ranks=others)) == listening


def test_a_worker_that_is_started_again_at_once_is_a_newcomer():
    with workers(4, 3) as made:
        made.start(0, 1, 2)
        made.form(0, 1, 2)
        made.kill(1)
        assert made.start(1) == [True]
        refused = made.ranks.run(job.meet, ranks=[3])[0]  # The others do not know of the loss yet.
        assert refused.error == "NotAMember"
        made.ranks.start(job.join, ranks=[3])
        assert made.ranks.run(job.gathered, 1, ranks=[0])[0].result() == 1
        plans = results(made.ranks.run(job.meet, ranks=[0, 2]))
        assert tasks([*plans, *results(made.ranks.collect(ranks=[3]))]) == [0, 2, 1]
        made.establish(0, 2, 3)


def test_newcomers_wait_until_there_is_room_and_outlive_rank_0():
    with workers(4, 4, 20.0, 1, 2) as made:
        made.start(0, 1)
        made.ranks.start(job.meet, ranks=[0, 1])
        made.start(2, 3)
        made.ranks.start(job.meet, ranks=[2, 3])
        plans = results(made.ranks.collect(ranks=[0, 1]))
        assert tasks(plans) == [0, 1]
        made.establish(0, 1)
        assert [each.error for each in made.ranks.collect(ranks=[2, 3])] == ["NotAMember"] * 2
        made.ranks.start(job.join, ranks=[2, 3])
        assert made.ranks.run(job.gathered, 2, ranks=[0])[0].result() == 2
        assert not made.ranks.run(job.room, ranks=[0])[0].result()
        assert tasks(made.form(0, 1)) == [0, 1]
        made.kill(0)
        plan = results(made.ranks.run(job.meet, ranks=[1]))  # It may be alone before they come.
        made.establish(*([1] if plan[0]["tasks"] == ["worker:1"] else []))
        if len(plan[0]["tasks"]) == 1:
            assert made.ranks.run(job.waits, ranks=[1])[0].result()
            plan = results(made.ranks.run(job.meet, ranks=[1]))
        assert len(plan[0]["tasks"]) == 2
        joined = 2 if plan[0]["tasks"][1] == "worker:2" else 3
        tasks([*plan, *results(made.ranks.collect(ranks=[joined]))])
        made.establish(1, joined)
        results(made.ranks.run(job.leave, ranks=[1]))
        results(made.ranks.run(job.leave, ranks=[joined]))
        late = made.ranks.collect(ranks=[5 - joined])[0]
        assert late.error == "JobOver"


def test_the_end_of_a_process_on_another_machine_is_proven_by_its_address():
    with workers(4, 4) as made:
        made.start(0, 1, 2, 3)
        results(made.ranks.run(job.move))
        made.form(0, 1, 2, 3)
        made.kill(0)
        plans = made.form(1, 2, 3)
        assert tasks(plans) == [1, 2, 3]
        assert max(each["seconds"] for each in plans) < 1.0
        results(made.ranks.run(job.meet, ranks=[1, 2, 3]))
        made.kill(2)  # Before the group has formed.
        lost = "worker:2 was lost before the group formed."
        assert results(made.ranks.run(job.ends, ranks=[1, 3])) == [lost, lost]
        results(made.ranks.run(job.part, ranks=[1, 3]))
        assert tasks(made.form(1, 3)) == [1, 3]


def test_of_two_halves_of_a_cut_network_one_goes_on():
    with workers(4, 4, 4.0, environ=SHORT) as made:
        made.start(0, 1, 2, 3)
        results(made.ranks.run(job.move))
        made.form(0, 1, 2, 3)
        for here, there in [((0, 1), (2, 3)), ((2, 3), (0, 1))]:
            results(made.ranks.run(job.cut, *there, ranks=here))
            made.ranks.start(job.meet, 0, there, ranks=here)
        assert tasks(results(made.ranks.collect(ranks=[0, 1]))) == [0, 1]
        made.establish(0, 1)
        for outcome in made.ranks.collect(ranks=[2, 3]):
            assert outcome.error == "CollectiveTimeoutError"
            assert "which does not answer, and may continue the job" in outcome.text
        results(made.ranks.run(job.cut))
        for outcome in made.ranks.run(job.meet, ranks=[2, 3]):
            assert outcome.error == "NotAMember"


def test_nobody_waits_for_a_worker_that_leaves():
    with workers(3, 3) as made:
        made.start(0, 1, 2)
        made.form(0, 1, 2)
        results(made.ranks.run(job.leave, ranks=[0]))
        assert tasks(made.form(1, 2)) == [1, 2]


def test_a_worker_comes_again_to_the_first_address_when_another_process_has_it():
    with workers(3, 2) as made:
        made.start(0, 1)
        made.ranks.start(job.meet, ranks=[1])
        assert made.ranks.run(job.gathered, 1, ranks=[0])[0].result() == 1
        results(made.ranks.run(job.leave, ranks=[0]))
        made.kill(0)
        made.start(0)
        plans = results(made.ranks.run(job.meet, ranks=[2]))
        assert tasks([*plans, *results(made.ranks.collect(ranks=[1]))]) == [0, 1]
        made.establish(2, 1)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_worker_is_left_out_and_learns_it(victim: int):
    others = [rank for rank in range(3) if rank != victim]
    with workers(3, 3, environ=SHORT) as made:
        made.start(0, 1, 2)
        made.form(0, 1, 2)
        made.stop(victim)
        plans = results(made.ranks.run(job.meet, 0, (victim,), ranks=others))
        made.establish(*others)
        assert tasks(plans) == others
        made.ranks.signal(victim, signal.SIGCONT)
        refused = made.ranks.run(job.meet, ranks=[victim])[0]
        assert refused.error == "NotAMember"
        assert refused.text == f"the job continues without worker:{victim}, which may join."
        made.ranks.start(job.join, ranks=[victim])
        assert made.ranks.run(job.waits, ranks=others[:1])[0].result()
        plans = results(made.ranks.run(job.meet, ranks=others))
        assert tasks([*plans, *results(made.ranks.collect(ranks=[victim]))]) == [*others, victim]
        made.establish(*others, victim)


def test_a_suspect_that_answers_is_waited_for():
    with workers(3, 3, environ=SHORT) as made:
        made.start(0, 1, 2)
        made.form(0, 1, 2)
        made.ranks.start(job.meet, 0, (2,), ranks=[0, 1])
        results(made.ranks.run(job.compute, 1.5, ranks=[2]))  # For longer than they are patient.
        plans = results(made.ranks.run(job.meet, ranks=[2]))
        assert tasks([*results(made.ranks.collect(ranks=[0, 1])), *plans]) == [0, 1, 2]
        made.establish(0, 1, 2)


def test_below_min_workers_all_learn_who_is_missing():
    with workers(3, 3, 1.0, 3) as made:
        made.start(0, 1, 2)
        made.form(0, 1, 2)
        made.kill(1)
        what = "waited 1 s for more workers: 2 of min_workers=3 came."
        for outcome in made.ranks.run(job.meet, ranks=[0, 2]):
            assert (outcome.error, outcome.text.partition(" Start")[0]) == (
                "CollectiveTimeoutError",
                f"worker:0 {what}",
            )


def test_a_socket_that_a_launcher_holds_open_delays_nobody():
    with workers(3, 3) as made, contextlib.ExitStack() as held:
        made.start(0, 1, 2)
        made.form(0, 1, 2)
        made.kill(0)
        held.enter_context(listening_at(made.addresses[0]))
        plans = made.form(1, 2)
        assert tasks(plans) == [1, 2]
        assert max(each["seconds"] for each in plans) < 1.0


def test_a_look_at_hosts_that_are_silent_is_short():
    addresses = free_addresses({"worker": 2})["worker"]
    with listening_at(addresses[1]):
        meetings = Meetings(addresses, 0, "worker:0", Elastic(), 0.2)
        begun = time.monotonic()
        assert meetings.look() is None
        assert time.monotonic() - begun < 10.0
        missing = rf"the workers at {addresses[1]} to start\. Start them unless the job is over"
        with pytest.raises(CollectiveTimeoutError, match=missing):
            meetings.meet(WorkerReport())
        meetings.close()
        meetings.close()


def test_a_job_of_one_worker_ends_a_meeting_at_once():
    addresses = free_addresses({"worker": 1})["worker"]
    with pytest.raises(ValueError, match="min_workers is 2, and the cluster has 1 workers"):
        Meetings(addresses, 0, "worker:0", Elastic(min_workers=2), 5.0)
    with contextlib.closing(Meetings(addresses, 0, "worker:0", Elastic(), 5.0)) as meetings:
        joined = meetings.meet(WorkerReport(unit=3))
        joined.info.listener.close()
        meetings.establish(joined.plan)
        meetings.check(joined.plan)
        assert (joined.info.size, joined.plan.reports[0].unit) == (1, 3)
        assert meetings.roster is joined.plan.roster


def test_a_worker_that_cannot_reach_the_first_one_names_it():
    addresses = free_addresses({"worker": 2})["worker"]
    with contextlib.closing(Meetings(addresses, 1, "worker:1", Elastic(), 0.2)) as meetings:
        late = f"worker:1 waited 0.2 s for the first worker, at {addresses[0]}, to start"
        with pytest.raises(CollectiveTimeoutError, match=late):
            meetings.meet(WorkerReport())


def test_a_newcomer_learns_that_its_loop_is_over():
    with workers(3, 2) as made:
        made.start(0, 1)
        made.form(0, 1)
        made.kill(1)
        made.start(1)
        made.ranks.start(job.join, ranks=[2])
        assert made.ranks.run(job.gathered, 1, ranks=[0])[0].result() == 1
        results(made.ranks.run(job.goes_on, 1, ranks=[0]))
        assert made.ranks.collect(ranks=[2])[0].error == "LoopOver"


def test_a_newcomer_without_a_job_gives_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ndistribute.collective.meeting._OVER_SECONDS", 0.1)
    addresses = free_addresses({"worker": 2})["worker"]
    meetings = Meetings(addresses, 0, "worker:0", Elastic(), 5.0)
    with pytest.raises(WorkerLostError, match="no worker of the job that worker:0 waits for"):
        meetings.join(WorkerReport())
    meetings.close()


def test_a_job_outlives_random_kills(tmp_path: Path):
    """Workers are killed, also while they meet and while groups form, and started again."""
    kills, size, rng = 4 * int(os.environ.get("FAULTS_RUNS", "1")), 3, random.Random()
    log, seconds = tmp_path / "log", 0.4 * kills + 1.5
    log.touch()
    addresses, begun = free_addresses({"worker": size})["worker"], time.monotonic()
    with Ranks(size + kills) as ranks:

        def start(index: int, rank: int) -> None:
            left = begun + seconds - time.monotonic()
            ranks.start(job.work, addresses, index, str(log), left, ranks=[rank])

        at = list(range(size))
        for index in at:
            start(index, index)
        wait_until(lambda: "\n" in log.read_text())
        for rank in range(size, size + kills):
            index, pause = rng.randrange(size), threading.Event()
            pause.wait(rng.uniform(0.0, 0.4))  # The moment of the kill is what is random.
            ranks.end(at[index])
            pause.wait(rng.choice([0.0, 0.05]))
            start(index, rank)
            at[index] = rank
        assert min(results(ranks.collect(ranks=at))) >= 1
    rows = [line.split() for line in log.read_text().splitlines()]
    assert len({row[0] for row in rows}) == len({row[1] for row in rows}) > kills
