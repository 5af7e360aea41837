"""Interrupts become requests inside the block, and interrupts again after it."""

import signal
import threading

import pytest

from recoup.train.fit_call import Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(number):
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert not interruption.is_requested
        signal.raise_signal(number)
        assert interruption.is_requested
    assert signal.getsignal(number) is before


def test_the_second_interrupt_raises():
    def twice():
        with Interruption():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        twice()
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_install_no_handlers():
    seen = []

    def work():
        with Interruption() as interruption:
            seen.append(interruption.is_requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
