"""The supervisor, with small real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.local import supervisor as module
from services.local.supervisor import Command, Supervisor, describe_exit

TETHER = Path(module.__file__).with_name("tether.py")
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
PARENT_OF_ONE = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout.strip()[:1] not in (
        "Z",
        "",
    )


def eventually(condition: Callable[[], bool], seconds: float = 10) -> bool:
    give_up_at = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.02)
    return True


def next_exit(supervisor: Supervisor) -> module.Exit:
    """Poll until a child has ended by itself."""
    exits: list[module.Exit] = []

    def ended() -> bool:
        exits.extend(supervisor.poll())
        return bool(exits)

    assert eventually(ended)
    return exits[0]


def python(name: str, code: str, *, stop_order: int = 0, grace_seconds: float = 5) -> Command:
    return Command(name, (sys.executable, "-c", code), dict(os.environ), stop_order, grace_seconds)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path)
    yield supervisor
    supervisor.kill()


def written(supervisor: Supervisor, name: str) -> str:
    return supervisor.log(name).read_text()


def test_a_crash_is_reported_with_its_last_words_and_restarted(watched: Supervisor) -> None:
    watched.start(python("fragile", "import sys; print('first'); sys.stderr.write('out of luck'); sys.exit(3)"))
    first = next_exit(watched)
    assert (first.name, first.reason, first.restart_seconds) == ("fragile", "exit code 3", 0.5)
    assert "out of luck" in first.tail
    assert watched.pid("fragile") is None
    assert next_exit(watched).restart_seconds == 1
    assert written(watched, "fragile").count("out of luck") == 2


def test_a_killed_child_is_restarted_as_a_new_process(watched: Supervisor) -> None:
    watched.start(python("steady", "import time; time.sleep(600)"))
    first = watched.pid("steady")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert next_exit(watched).reason == "killed by SIGKILL"
    assert eventually(lambda: not watched.poll() and watched.pid("steady") not in (None, first))


def test_a_command_that_does_not_exist_says_so(watched: Supervisor) -> None:
    watched.start(Command("ghost", ("/nonexistent/ghost",), dict(os.environ), 0, 1))
    assert next_exit(watched).tail == ["headrace: cannot run /nonexistent/ghost: No such file or directory"]


def test_children_stop_in_order(watched: Supervisor, tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = """
import signal, sys, time
def end(*_):
    time.sleep(0.3)
    open({order!r}, "a").write({name!r} + " ")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(600)
"""
    for name, stop_order in (("servers", 2), ("gateway", 0), ("worker", 1)):
        watched.start(python(name, code.format(order=str(order), name=name), stop_order=stop_order))
    assert eventually(lambda: all("up" in written(watched, name) for name in ("servers", "gateway", "worker")))
    assert watched.stop() == []
    assert order.read_text().split() == ["gateway", "worker", "servers"]


def test_one_that_does_not_listen_is_killed_after_its_grace_period(watched: Supervisor) -> None:
    watched.start(python("stubborn", STUBBORN, grace_seconds=0.4))
    assert eventually(lambda: "up" in written(watched, "stubborn"))
    pid = watched.pid("stubborn")
    assert pid is not None
    started_at = time.monotonic()
    assert watched.stop() == ["stubborn"]
    assert 0.4 <= time.monotonic() - started_at < 3
    assert not alive(pid)


def test_haste_kills_at_once(watched: Supervisor) -> None:
    watched.start(python("stubborn", STUBBORN, grace_seconds=60))
    watched.start(python("last", STUBBORN, stop_order=1, grace_seconds=60))
    assert eventually(lambda: "up" in written(watched, "stubborn") and "up" in written(watched, "last"))
    pids = [watched.pid("stubborn"), watched.pid("last")]
    started_at = time.monotonic()
    assert sorted(watched.stop(hurry=lambda: time.monotonic() - started_at > 0.2)) == ["last", "stubborn"]
    assert time.monotonic() - started_at < 3
    assert not any(alive(pid) for pid in pids if pid)


def test_what_a_child_started_ends_with_it(watched: Supervisor) -> None:
    watched.start(python("parent", PARENT_OF_ONE))
    assert eventually(lambda: written(watched, "parent").strip().isdigit())
    grandchild = int(written(watched, "parent"))
    assert alive(grandchild)
    watched.stop()
    assert eventually(lambda: not alive(grandchild))


def test_children_are_out_of_reach_of_the_terminals_ctrl_c(watched: Supervisor) -> None:
    watched.start(python("steady", "import time; time.sleep(600)"))
    pid = watched.pid("steady")
    assert pid is not None
    assert eventually(lambda: os.getsid(pid) == pid)


@pytest.mark.parametrize("flags", [["--watch"], []] if sys.platform.startswith("linux") else [["--watch"]])
def test_a_tethered_command_dies_with_its_parent(flags: list[str]) -> None:
    code = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-I", "-S", {str(TETHER)!r}, *{flags!r}, str(os.getpid()), "sh", "-c", "echo $$; exec sleep 600"])
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        parent.wait()
        assert eventually(lambda: not alive(pid), 5)


def test_a_tethered_command_whose_parent_is_gone_already_does_not_start(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    done = subprocess.run([sys.executable, str(TETHER), "1", "touch", str(mark)], check=False)
    assert done.returncode == 1
    assert not mark.exists()


def test_logs_keep_the_last_run_and_stay_short(watched: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.start(python("talker", "print('one', flush=True); import time; time.sleep(600)"))
    assert eventually(lambda: "one" in written(watched, "talker"))
    watched.stop()
    watched.start(python("talker", "import time\nwhile True: print('x' * 99, flush=True); time.sleep(0.01)"))
    older = watched.log("talker").with_name("talker.log.1")
    assert older.read_text() == "one\n"
    monkeypatch.setattr(module, "LONGEST_LOG_BYTES", 1000)
    assert eventually(lambda: watched.log("talker").stat().st_size > 2000)
    watched.trim_logs()
    assert older.stat().st_size > 2000
    assert eventually(lambda: 0 < watched.log("talker").stat().st_size < 2000)
    assert not written(watched, "talker").startswith("\0")  # written at the end of the emptied file, not beyond it


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (1, "exit code 1"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words
