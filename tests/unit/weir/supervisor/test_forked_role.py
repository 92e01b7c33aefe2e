"""A forked role runs as a new command would: with its own session, files, environment and exit."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from weir.supervisor.forked_role import ForkedRole
from weir.supervisor.supervisor import SignalQueue


def run(main: Callable[[Sequence[str]], None], *words: str, kept: tuple[int, ...] = ()) -> ForkedRole:
    return ForkedRole(main, words, {"OF_MINE": "1"}, kept, "weir of a test")


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def look_around(words: Sequence[str]) -> None:
    reply = [
        os.getsid(0) == os.getpid(),
        dict(os.environ) == {"OF_MINE": "1"},
        {fd for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd)} == {0, 1, 2, int(words[1])},
        os.readlink("/proc/self/fd/0") == os.devnull,
        "weir of a test" in " ".join(psutil.Process().cmdline()),
        sys.argv[1:] == list(words),
        signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(),
    ]
    Path(words[0]).write_text(repr(reply))


def test_what_it_finds(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    assert run(look_around, str(tmp_path / "told"), str(writing), kept=(writing,)).wait() == 0
    assert (tmp_path / "told").read_text() == repr([True] * 7)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (lambda words: None, 0),
        (lambda words: sys.exit(3), 3),
        (lambda words: sys.exit("no"), 1),
        (lambda words: 1 // 0, 1),
    ],
    ids=["returns", "exits", "exits with words", "raises"],
)
def test_how_it_ends(end: Callable[[Sequence[str]], None], status: int) -> None:
    assert run(end).wait() == status


def wait_for_ever(words: Sequence[str]) -> None:
    os.write(int(words[0]), b".")
    os.read(int(words[1]), 1)


@pytest.mark.parametrize(("send", "number"), [(ForkedRole.terminate, -15), (ForkedRole.kill, -9)])
def test_signals_end_it(send: Callable[[ForkedRole], None], number: int) -> None:
    (started, starts), (ends, ended) = os.pipe(), os.pipe()
    role = run(wait_for_ever, str(starts), str(ends), kept=(starts, ends))
    os.read(started, 1)
    send(role)
    assert role.wait() == number
    for fd in (started, starts, ends, ended):
        os.close(fd)


def test_signals_at_its_start_are_its_own() -> None:
    with SignalQueue((signal.SIGTERM,)) as queue:
        for _ in range(20):
            role = run(lambda words: signal.pause())
            role.terminate()
            assert role.wait() == -signal.SIGTERM
        assert queue.take() == []


def test_what_it_registers_is_run_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "left"

    def main(words: Sequence[str]) -> None:
        atexit.register(path.touch)

    with tempfile.TemporaryDirectory() as folder:  # not to be removed by the child
        assert run(main).wait() == 0
        assert path.exists()
        assert Path(folder).is_dir()


@pytest.mark.parametrize("is_closed", [False, True], ids=["nobody reads", "closed"])
def test_output_that_goes_nowhere(is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    output = open(writing, "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", None if is_closed else output)
    output.write("the start-up block")
    assert run(lambda words: None).wait() == 0
    with pytest.raises(BrokenPipeError):
        output.close()


@pytest.mark.parametrize("is_script", [False, True], ids=["in the current folder", "beside the script"])
def test_what_lies_about_is_not_imported(is_script: bool, tmp_path: Path) -> None:
    folder, code = (
        tmp_path / "folder",
        "import sys; from weir.supervisor.forked_role import import_roles; import_roles()",
    )
    folder.mkdir()
    (folder / "uvloop.py").write_text("raise SystemExit(1)")
    (folder / "program").write_text(code)
    words = [str(folder / "program")] if is_script else ["-c", code]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path if is_script else folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_role_has_its_decoders_before_it_starts() -> None:
    code = (
        "from weir.supervisor.forked_role import import_roles; import_roles(('worker',))\n"
        "from weir.schemas.wire import batches, codec\n"
        "built = codec._decoder.cache_info().misses\n"
        "for kind in (batches.BatchMessage, batches.Completions): codec._decoder(kind)\n"
        "print(built > 0, codec._decoder.cache_info().misses == built)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
