"""What a server holds outlives its process: snapshots, and with a log every acknowledged change."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ndistribute import tensor_files
from ndistribute.errors import CheckpointCorruptError, DistributeError
from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.client import ServerClient, Servers
from ndistribute.parameter_server.snapshot import Disk
from ndistribute.parameter_server.store_service import LocalServer, StoreService
from tests.parameter_server.calls import Client, add, apply, assign, content, new, read
from tests.processes import wait_until

ONES = np.ones(3)
KILLS = int(os.environ.get("FAULTS_KILLS", "20"))
SEED = int(os.environ.get("FAULTS_SEED", "0")) or random.SystemRandom().getrandbits(32)


@contextlib.contextmanager
def serving(directory, durability="snapshot", seconds=3600.0, **options):
    service = StoreService(directory, "ps:0", seconds=seconds, durability=durability, **options)
    with contextlib.closing(service):
        yield service, Client(service, "worker:0#a")


@pytest.fixture
def left(tmp_path):
    """The directory that a server leaves, which is not there yet."""
    return tmp_path / "left"


@contextlib.contextmanager
def killed(directory: Path, **values):
    """Run a service that keeps a log, as one that is killed at the end leaves its directory."""
    with serving(directory.with_name("live"), "log") as (service, client):
        client.ask(m.Create(tuple(map(new, values or "w", values.values() or [ONES]))))
        yield service, client
        shutil.copytree(directory.with_name("live"), directory)


def files(directory: Path, kind: str) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix.endswith(kind))


def totals(client: Client) -> tuple[int, int]:
    reply = client.ask(m.Status())
    return reply.total, reply.began


def test_a_server_without_a_directory_writes_nothing_and_says_so():
    with serving(None) as (service, client):
        assert client.ask(m.Status("snapshot")).kind == "unknown"
        assert not service.resumed
    with pytest.raises(ValueError, match="needs a directory for its log"):
        StoreService(None, "ps:0", durability="log")


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_server_goes_on_where_it_ended(tmp_path, durability):
    with serving(tmp_path, durability) as (service, client):
        client.ask(m.Create((new("w", ONES),)))
        client.change(add("w", ONES))
        assert client.ask(m.Status("snapshot")).total == 1
        client.change(add("w", ONES))
        version = client.ask(read("w")).versions[0]
    with serving(tmp_path, durability) as (service, client):
        assert service.resumed
        assert totals(client) == (2, 2)
        assert client.value("w").tolist() == [3, 3, 3]
        assert client.ask(read("w")).versions[0] > version
        assert client.change(add("w", ONES), sequence=2).repeated


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_variables_of_graphs_and_of_strategies_are_apart_whatever_their_names(tmp_path, durability):
    with serving(tmp_path / "kept", durability) as (service, client):
        client.ask(m.Create((new("w", ONES),)))
        service.store.shared.assign("w", np.float64(5.0))
        client.change(add("w", ONES))
        if durability == "log":
            shutil.copytree(tmp_path / "kept", tmp_path / "log")
    left = tmp_path / ("kept" if durability == "snapshot" else "log")
    with serving(left, durability) as (service, client):
        assert client.value("w").tolist() == [2, 2, 2]
        assert service.store.shared.value("w") == 5.0


def test_a_server_answers_while_it_writes_what_was_before(tmp_path, monkeypatch):
    began, go_on, write = threading.Event(), threading.Event(), tensor_files.write

    def slowly(*args):
        began.set()
        assert go_on.wait(timeout=50)
        return write(*args)

    with serving(tmp_path) as (service, client):
        monkeypatch.setattr(tensor_files, "write", slowly)
        client.ask(m.Create((new("w", ONES),)))
        assert service.handle(client, 7, m.Status("snapshot")) is None
        assert began.wait(timeout=50)
        assert client.change(add("w", ONES)).total == 1
        for call in (8, 9):  # Two threads of the client ask at once.
            assert service.handle(client, call, m.Status("snapshot")) is None
        assert client.sent.empty()
        go_on.set()
        answers = [client.sent.get(timeout=50) for _ in range(3)]
        assert [(call, reply.total) for call, reply in answers] == [(7, 0), (8, 1), (9, 1)]
    with serving(tmp_path) as (_, client):
        assert client.value("w").tolist() == [2, 2, 2]


def test_a_snapshot_that_can_not_be_written_is_no_end_but_the_last_one_is_told(
    tmp_path, monkeypatch
):
    def full(*args):
        raise OSError(28, "No space left on device")

    lost = pytest.raises(DistributeError, match="could not write its last snapshot")
    with lost, serving(tmp_path, left) as (_, client):
        client.ask(m.Create((new("w", ONES),)))
        with monkeypatch.context() as patched:
            patched.setattr(tensor_files, "write", full)
            reply = client.ask(m.Status("snapshot"))
            assert reply.kind == "full"
            assert "ps:0 could not write a snapshot: [Errno 28] No space" in reply.message
        assert client.ask(m.Status("snapshot")).total == 0
        client.change(add("w", ONES))
        monkeypatch.setattr(tensor_files, "write", full)


def test_what_fails_again_and_again_is_logged_once(tmp_path, caplog):
    with serving(tmp_path) as (_, client):
        client.ask(m.Create((new("w", ONES),)))
        for _ in range(2):
            with limited(100):
                assert [client.ask(m.Status("snapshot")).kind for _ in range(3)] == ["full"] * 3
            assert client.ask(m.Status("snapshot")).total == 0
            client.ask(m.Delete(("w",)))
    said = [" ".join(record.getMessage().split()[1:5]) for record in caplog.records]
    assert said == ["could not write a", "can write a snapshot"] * 2


def test_a_state_counts_all_changes_also_those_that_are_no_transactions(tmp_path):
    for kept in (3, 6):
        with serving(tmp_path) as (service, client):
            client.ask(m.Create((new("w", ONES),)))
            client.change(add("w", ONES), sequence=kept)
            client.ask(m.Delete(("w",)))
            assert service.store.kept == kept


def test_snapshots_that_can_not_be_used_keep_a_server_from_starting(tmp_path):
    for data in ({"not": "a store"}, {"store": {"total": "one"}, "log": 1, "logged": False}):
        tensor_files.write(tmp_path, "ps-0", {}, data)
        with pytest.raises(CheckpointCorruptError, match="another version of ndistribute wrote it"):
            StoreService(tmp_path, "ps:0")


def test_a_change_at_the_end_is_left_to_the_next_life(tmp_path):
    with serving(tmp_path) as (service, client):
        client.ask(m.Create((new("w", ONES),)))
        service.close()
        assert service.handle(client, 1, m.Delete(("w",))) is None
        assert client.value("w").tolist() == [1, 1, 1]


def give(client, step):
    return client.change(m.Aggregate("t", step, 2, apply("sgd", "w", m.Gradient(ONES), 1.0)))


def test_a_client_that_leaves_is_waited_for_no_longer_unless_it_is_back():
    with serving(None) as (service, a):
        a.ask(m.Create((new("w", ONES), new("n", 0))))
        b = Client(service, "worker:1#b")
        for client in (a, b, a):
            give(client, 0 if client is b else totals(a)[0] // 2)
        assert service.handle(a, 9, m.AwaitStep("t", 2, 2)) is None
        again = Client(service, "worker:1#b")
        service.disconnected(b, died=True)
        assert a.sent.empty()
        service.disconnected(again, died=False)
        call, reply = a.sent.get(timeout=50)
        assert (call, reply.kind) == (9, "left")


def test_who_died_while_a_server_was_away_is_waited_for_no_longer(tmp_path, left):
    with serving(tmp_path) as (service, a):
        a.ask(m.Create((new("w", ONES), new("n", 0))))
        for client in (a, Client(service, "worker:1#b")):
            give(client, 0)
        give(a, 1)
    with serving(tmp_path, return_seconds=0.1) as (service, a):
        assert service.handle(a, 5, m.AwaitStep("t", 2, 2)) is None
        call, reply = a.sent.get(timeout=50)
        assert (call, reply.kind) == (5, "left")
        assert "worker:1#b" in reply.message


def test_every_acknowledged_change_is_in_the_log_at_once(left):
    with killed(left, w=ONES, n=0, x=ONES) as (service, client):
        give(client, 0)
        client.ask(m.Status("snapshot"))  # The sum of a step that is not complete is in it.
        give(Client(service, "worker:1#b"), 0)
        client.change(add("w", ONES), assign("x", 5 * ONES))
        client.ask(m.Delete(("x",)))
        assert isinstance(client.change(add("none", ONES)), m.Failure)
        expected = content(service.store)[1]["variables/w"]
    assert all((left / name).stat().st_mode & 0o777 == 0o600 for name in files(left, ".log"))
    with serving(left, "log") as (service, client):
        assert totals(client) == (3, 3)
        assert content(service.store)[1]["variables/w"] == expected
        assert client.ask(read("x")).kind == "unknown"
        assert client.ask(m.AwaitStep("t", 1, 2)).value == 1


def test_the_log_is_in_the_order_of_the_changes_whoever_makes_them(left):
    with killed(left) as (service, client), ThreadPoolExecutor(4) as pool:

        def write(name):
            own = Client(service, name)
            for number in range(20):
                own.change(assign("w", hash((name, number)) % 1000 * ONES))

        list(pool.map(write, ["a#1", "b#1", "c#1", "d#1"]))
        expected = client.value("w").tolist()
    with serving(left) as (_, client):
        assert totals(client) == (80, 80)
        assert client.value("w").tolist() == expected


@pytest.mark.parametrize("cut", [1, 25, 90])
def test_a_record_that_is_torn_is_cut_off_and_those_before_it_count(left, cut):
    with killed(left) as (_, client):
        client.change(add("w", ONES))
        client.change(add("w", ONES))
    log = left / "ps-0.000001.log"
    os.truncate(log, log.stat().st_size - cut)
    with serving(left, "log") as (_, client):
        assert totals(client) == (1, 1)
        assert not client.change(add("w", ONES), sequence=2).repeated
    with serving(left, "log") as (_, client):
        assert client.value("w").tolist() == [3, 3, 3]


def restored(directory: Path) -> list[float]:
    """Return what a server reads of its files, as it does at its start."""
    with contextlib.closing(Disk(directory, "ps:0", log=False)) as disk:
        return disk.store.variables.cell("w").array.tolist()


def test_wherever_a_log_is_damaged_nothing_acknowledged_is_lost_silently(left, caplog):
    """All updates behind a bit that was flipped were taken for torn, and cut off for good."""
    caplog.set_level("ERROR")
    ends = []  # How long the log was before each update, and at the end.
    with killed(left, w=np.zeros(2)) as (service, client):
        for number in range(2):
            ends.append(service._disk.logs[0].written)
            client.change(add("w", np.full(2, 2.0**number)))
    log = left / "ps-0.000001.log"
    data = log.read_bytes()
    ends.append(len(data))
    told = []
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        log.write_bytes(flipped)
        try:
            assert restored(left) == [3.0, 3.0]
        except CheckpointCorruptError as error:
            told.append(f"{error}")
        assert log.read_bytes() == flipped
        (left / "ps-0.000002.log").unlink(missing_ok=True)
    assert len(told) >= len(data) * 3 // 4
    assert all(str(log) in text for text in told)
    for size in range(ends[0], len(data), 3):
        for zeros in (0, 40):  # Some file systems leave them.
            log.write_bytes(data[:size] + bytes(zeros))
            # Of a mark that only zeros follow, nothing is needed any more.
            whole = sum(end - 8 * (zeros > 0) <= size for end in ends) - 1
            assert restored(left) == [2.0**whole - 1] * 2
            assert log.stat().st_size == ends[whole]
            (left / "ps-0.000002.log").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda logs, ends: [logs[0][: ends[0]] + logs[0][ends[1] :], logs[1]],
        lambda logs, ends: [swapped(logs[0], *ends[:3]), logs[1]],
        lambda logs, ends: [logs[0][: ends[2]], logs[1]],
        lambda logs, ends: [logs[0][:-9], logs[1]],
        lambda logs, ends: [b"", logs[1]],
        lambda logs, ends: [logs[0], logs[0]],
        lambda logs, ends: [logs[0], logs[1] + logs[1][8:]],
    ],
    ids=["missing", "swapped", "cut before a log", "torn", "emptied", "another log", "twice"],
)
@pytest.mark.parametrize("snapshot", [False, True])
def test_whole_requests_that_are_missing_or_out_of_order_are_told(left, damage, snapshot):
    """The others were made as if nothing had been there."""
    ends = []  # Where in the first log each update ends.
    with killed(left) as (service, client):
        if snapshot:
            client.ask(m.Status("snapshot"))
        for number in range(5):
            client.change(add("w", ONES))
            ends.append(service._disk.logs[-1].written)
            if number == 3:
                service._disk.begin_log()
    paths = [left / name for name in files(left, ".log")[-2:]]
    changed = damage([path.read_bytes() for path in paths], ends)
    for path, data in zip(paths, changed, strict=True):
        path.write_bytes(data)
    advice = r"damaged at byte \d+.* file is unchanged.*move later logs away"
    with pytest.raises(CheckpointCorruptError, match=advice):
        restored(left)
    assert [path.read_bytes() for path in paths] == changed


def swapped(data: bytes, first: int, second: int, third: int) -> bytes:
    return data[:first] + data[second:third] + data[first:second] + data[third:]


def test_the_tag_of_an_update_in_logs_stays():
    assert m.VariableUpdate.__struct_config__.tag == "Update"  # As before its class was renamed.


@pytest.mark.parametrize("buffers", [0, 1])
def test_a_log_of_another_version_is_told_and_kept(left, buffers):
    """It was taken for a record that is not whole, and cut off to nothing."""
    left.mkdir()
    log = left / "ps-0.000001.log"
    parts = [8 + index for index in range(buffers)]
    head = struct.pack(f"<III{buffers}Q", 1 << 31, 40, buffers, *parts)
    log.write_bytes(data := head + b"\x94\xa6Create" + bytes(40 + sum(parts)))
    with pytest.raises(CheckpointCorruptError, match="another version of ndistribute wrote it"):
        StoreService(left, "ps:0", durability="log")
    assert log.read_bytes() == data


def test_a_snapshot_replaces_the_log_and_the_one_before_is_enough_as_well(tmp_path, left):
    with killed(left) as (_, client):
        for number in range(1, 5):
            client.change(add("w", ONES))
            assert client.ask(m.Status("snapshot")).total == number
        client.change(add("w", ONES))
        assert files(tmp_path / "live", ".log") == ["ps-0.000004.log", "ps-0.000005.log"]
    newest = tensor_files.newest(left, "ps-0").path
    (newest / "data.json").write_bytes(b"{}")
    with serving(left) as (_, client):  # A server that kept a log goes on with it.
        assert totals(client) == (5, 5)
        assert client.value("w").tolist() == [6, 6, 6]
        assert client.ask(m.Status("snapshot")).total == 5
        client.change(add("w", ONES), sequence=6)
    assert files(left, ".log")
    with serving(left, "log") as (_, client):
        assert totals(client) == (6, 6)


def test_a_log_that_grows_long_is_replaced_before_a_snapshot_is_due(tmp_path, monkeypatch):
    monkeypatch.setattr("ndistribute.parameter_server.store_service._LOG_BYTES", 300)
    with serving(tmp_path, "log") as (_, client):
        client.ask(m.Create((new("w", ONES),)))
        for _ in range(4):
            client.change(add("w", ONES))
        wait_until(lambda: tensor_files.newest(tmp_path, "ps-0"))


def test_a_log_that_is_missing_is_told(left):
    with killed(left) as (_, client):
        client.ask(m.Status("snapshot"))
    (left / "ps-0.000002.log").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"000002\.log.* updates are missing"):
        StoreService(left, "ps:0")


@contextlib.contextmanager
def limited(nbytes: int):
    """Let no file of this process grow beyond a size, as a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_on_a_full_disk_nothing_is_changed_nor_acknowledged(tmp_path, left):
    big = np.ones(4096)
    with killed(left, w=big) as (_, client):
        with limited((tmp_path / "live" / "ps-0.000001.log").stat().st_size + 1000):
            reply = client.change(add("w", big), sequence=1)
            assert client.value("w")[0] == 1
        assert reply.kind == "full"
        assert "live/ps-0.000001.log: [Errno 27] File too large; nothing was" in reply.message
        assert not client.change(add("w", big), sequence=1).repeated
        assert client.change(add("w", big), sequence=1).repeated
    with serving(left) as (_, client):
        assert totals(client) == (1, 1)
        assert client.value("w")[0] == 2


def test_after_a_sync_that_failed_nothing_is_acknowledged_until_a_snapshot(left, monkeypatch):
    def fails(*args):
        raise OSError(5, "Input/output error")

    with killed(left) as (_, client):
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", fails)
            patched.setattr(tensor_files, "write", fails)
            for consequence in ("the change may be lost", "nothing was changed"):
                reply = client.change(add("w", ONES), sequence=1)
                assert reply.kind == "full"
                assert "ps-0.000001.log" in reply.message
                assert consequence in reply.message
                assert client.ask(m.Status("snapshot")).kind == "full"
            assert client.change(add("w", ONES), sequence=2).kind == "full"
        assert client.ask(m.Status("snapshot")).total == 1
        assert client.change(add("w", ONES), sequence=1).repeated
        assert client.change(add("w", ONES), sequence=2).total == 2
    with serving(left) as (_, client):
        assert totals(client) == (2, 2)
        assert client.value("w").tolist() == [3, 3, 3]


LIVES = """
import itertools, json, logging, os, signal, sys, threading
import numpy as np
from ndistribute.parameter_server import snapshot, store_service
from ndistribute.parameter_server.messages import Create, NewVariable
from tests.parameter_server.calls import Client, add, read

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def arm(point, after):
    # Only what happens to the log counts.
    calls, write, sync = itertools.count(1), snapshot._write, os.fdatasync
    def torn(file, buffer):
        if next(calls) == after:
            write(file, memoryview(buffer)[: len(buffer) // 2])
            die()
        write(file, buffer)
    def synced(file):
        last = next(calls) == after
        if last and point == "before sync":
            die()
        sync(file)
        if last:
            die()
    if point == "in append":
        snapshot._write = torn
    else:
        os.fdatasync = synced

def live(directory, first, point, after):
    service = store_service.StoreService(directory, "ps:0", durability="log", seconds=0.02)
    chief = Client(service, "chief#1")
    chief.ask(Create(tuple(NewVariable(name, (64,), "float64", fill=0.0) for name in first)))
    say({"values": [sorted(set(value.tolist())) for value in chief.ask(read(*first)).arrays]})
    arm(point, after)
    def work(name):
        client = Client(service, name)
        for number in itertools.count(first[name]):
            reply = client.change(add(name, np.full(64, float(number))), sequence=number)
            say({"client": name, "number": number, "reply": type(reply).__name__})
    for name in first:
        threading.Thread(target=work, args=(name,)).start()

def say(what):
    os.write(1, json.dumps(what).encode() + b"\\n")

logging.disable()
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        live(*json.loads(line))
        break
    say({"ended": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})
"""


def test_killed_at_any_moment_a_server_has_every_acknowledged_change_once(tmp_path):
    """Clients repeat what was not acknowledged; each adds the number of its transaction."""
    print(f"FAULTS_SEED={SEED}")
    chance = random.Random(SEED)
    last = dict.fromkeys(("a#1", "b#1", "c#1"), 0)  # The last number that was acknowledged.
    command = [sys.executable, "-c", LIVES]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        for _ in range(KILLS + 1):
            point = chance.choice(["in append", "before sync", "after sync"])
            first = {name: number + 1 for name, number in last.items()}
            print(
                json.dumps([str(tmp_path), first, point, chance.randrange(1, 40)]),
                file=process.stdin,
                flush=True,
            )
            said = map(json.loads, iter(process.stdout.readline, ""))
            began = next(said)
            for held, number in zip(began["values"], last.values(), strict=True):
                assert held in ([total(number)], [total(number + 1)])
            for one in said:
                if "ended" in one:
                    assert one["ended"] == -signal.SIGKILL
                    break
                assert one["reply"] == "Changed"
                last[one["client"]] = one["number"]
        process.stdin.close()
    assert sum(last.values()) > KILLS


def total(number: int) -> float:
    return number * (number + 1) / 2


THREADS, ROUNDS = 8, 150


def test_updates_are_lost_between_lives_in_their_order_however_late_one_is_heard_of():
    """What a worker knew of an earlier life, and told late, was counted as lost."""
    caller = SimpleNamespace(name="chief:0#a", instance="", start=None, close=lambda: None)
    client = ServerClient(caller, "ps:0")
    for life, began, total in (("1", 0, 10), ("3", 25, 300), ("2", 10, 25), ("4", 300, 300)):
        client.learn(m.Report("ps:0", f"{9 - int(life)}", began, total, int(life)))
    assert client.lost_updates == 0
    client.learn(m.Report("ps:0", "0", 290, 295, 5))
    assert client.lost_updates == 10


def test_threads_that_change_at_once_lose_nothing_of_each_other():
    callers = [LocalServer().connect("worker:0#a", 20.0) for _ in range(2)]
    servers = Servers([ServerClient(caller, f"ps:{i}") for i, caller in enumerate(callers)])
    servers.create({i: [("v", np.zeros(()))] for i in range(2)})

    def change(_: int) -> None:
        for _ in range(ROUNDS):
            servers.change({i: [add("v", np.ones(()))] for i in range(2)})

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(change, range(THREADS)))
    finally:
        sys.setswitchinterval(before)
    for reply in servers.ask({i: read("v") for i in range(2)}).values():
        assert reply.arrays[0] == THREADS * ROUNDS
    servers.close()


def test_a_client_may_be_closed_again_in_the_middle_of_a_request():
    """A closed strategy that was collected there waited for the server's lock for ever."""
    server = LocalServer()
    caller = server.connect("worker:0#a", 20.0)
    caller.close()
    with server._lock:
        caller.close()


@pytest.mark.parametrize(
    "other",
    [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)],
)
def test_what_is_no_log_is_refused_and_not_taken_for_an_empty_one(tmp_path, other):
    with contextlib.closing(Disk(tmp_path, "ps:0", log=True)) as disk:
        path = disk.logs[-1].path
    path.unlink()
    other(path)
    with pytest.raises(CheckpointCorruptError, match=rf"did not write .*{path.name}"):
        Disk(tmp_path, "ps:0", log=True)
