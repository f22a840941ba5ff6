"""A moment ends what runs, whoever looks at the clock, and moments around it stay."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable

import pytest

from hetplan import deadline, kernels
from hetplan.deadline import check_time, ends_by, moment, moment_in, seconds_left
from hetplan.errors import LimitError, OutOfTimeError
from hetplan.interrupts import held, interrupt


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "LATE_SECONDS", 0.0)


def endless() -> None:
    while True:
        pass


def test_work_that_never_looks_at_the_clock_is_ended(at_once: None) -> None:
    with pytest.raises(OutOfTimeError), ends_by(moment_in(0.01)):
        endless()
    assert moment() == math.inf
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_the_earlier_of_two_moments_counts_and_the_later_one_stays(at_once: None) -> None:
    later = moment_in(1000.0)
    with ends_by(later):
        with pytest.raises(OutOfTimeError), ends_by(moment_in(0.01)):
            endless()
        assert moment() == later
        assert 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000.0
        with ends_by(moment_in(5000.0)):
            assert moment() == later
    assert seconds_left() == math.inf


def test_an_outer_moment_ends_what_an_inner_one_has_left(at_once: None) -> None:
    def inner_and_on() -> None:
        with ends_by(moment_in(1000.0)):
            check_time()
        endless()

    with pytest.raises(OutOfTimeError), ends_by(moment_in(0.05)):
        inner_and_on()


def test_compiled_code_is_not_broken_off(at_once: None) -> None:
    done = []

    def compiled() -> None:
        while seconds_left() > -0.05:
            pass
        done.append("all of it")

    with pytest.raises(OutOfTimeError), ends_by(moment_in(0.01)), held:
        compiled()
    assert done == ["all of it"]


def test_ctrl_c_counts_more_than_a_time_limit() -> None:
    def both() -> None:
        with held:
            held.stop(OutOfTimeError)
            interrupt(signal.SIGINT, None)

    with pytest.raises(KeyboardInterrupt):
        both()


def test_the_clock_stands_still_while_something_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 10.0, 20.0, 30.0, 30.0, 31.0])
    loading = kernels._Loading()
    loading.now = lambda: next(seconds)
    monkeypatch.setattr(kernels, "loading", loading)
    with loading:
        assert loading.seconds == 10.0
    assert loading.seconds == 20.0
    assert kernels.clock() == 10.0


def test_other_threads_and_alarms_are_left_alone(at_once: None) -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        with pytest.raises(OutOfTimeError), ends_by(moment_in(-1.0)):
            check_time()
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
    finally:
        signal.signal(signal.SIGALRM, before)
    found: list[str] = []
    thread = threading.Thread(target=_in_thread, args=(found.append,))
    thread.start()
    thread.join()
    assert found == ["ended"]
    assert not rung


def _in_thread(tell: Callable[[str], None]) -> None:
    with ends_by(moment_in(-1.0)):
        try:
            check_time()
        except OutOfTimeError:
            tell("ended")


def test_nothing_to_show_is_the_exit_code_of_a_limit() -> None:
    assert OutOfTimeError().exit_code == LimitError.exit_code == 4
    assert "raise it" in str(OutOfTimeError())
