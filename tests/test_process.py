"""Output that never blocks, stop requests, and files that must not be replaced."""

import os
import signal
import time

import pytest

from pipeline.atomic import MAX_RECORD_BYTES, read_regular, replace
from pipeline.process import PatientOutput, StopRequest


def test_a_pipe_that_nobody_reads_does_not_block_its_writer():
    reader, writer = os.pipe()
    output = PatientOutput(os.fdopen(writer, "w", encoding="utf-8"), longest=10)
    for _ in range(10_000):
        print("x" * 100, file=output)  # far more than the pipe and the queue hold
    began = time.monotonic()
    output.drain(timeout_s=0.1)
    assert time.monotonic() - began < 5
    received = os.read(reader, 1 << 16)
    assert received.startswith(b"x" * 100 + b"\n")
    os.close(reader)  # when `| head` ends, the rest is dropped without an error
    output.drain(timeout_s=10)
    print("more", file=output)
    output.drain(timeout_s=10)
    assert not output.isatty()


def test_text_that_a_terminal_cannot_show_is_an_error_of_its_writer():
    reader, writer = os.pipe()
    output = PatientOutput(os.fdopen(writer, "w", encoding="ascii"))
    with pytest.raises(UnicodeEncodeError):
        print("│", file=output)
    print("|", file=output)
    output.drain(timeout_s=10)
    assert os.read(reader, 100) == b"|\n"


@pytest.mark.parametrize("first_only", [False, True])
def test_only_a_later_second_signal_means_at_once(monkeypatch, first_only):
    stop = StopRequest(first_only=first_only)
    try:
        assert stop.reason is None
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)  # a scheduler often sends two
        assert stop.reason == "SIGUSR1" and not stop.at_once
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + 2)
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason == "SIGUSR1" and stop.at_once is not first_only
    finally:
        stop.close()


def test_a_device_is_not_replaced_by_a_file(tmp_path):
    """As root, `--static /dev/null` would otherwise turn the device into a regular file."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="not a regular file"):
        replace(fifo, b"text")
    assert fifo.is_fifo() and list(tmp_path.iterdir()) == [fifo]


def test_a_file_that_is_too_large_for_a_record_is_not_read_whole(tmp_path):
    file = tmp_path / "run.json"
    file.touch()
    os.truncate(file, MAX_RECORD_BYTES + 1)
    with pytest.raises(OSError, match="larger than"):
        read_regular(file)
