"""Decoding runs without cuDNN's attention and leaves the setting as it was, beside others, too."""

import threading

import pytest
import torch

from specmm.loading.hardware import attention_of_any_length


def on():
    return torch.backends.cuda.cudnn_sdp_enabled()


@pytest.fixture(params=[True, False])
def setting(request):
    before = on()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_it_is_off_within_and_as_it_was_after(setting):
    with attention_of_any_length():
        assert not on()
        with attention_of_any_length():
            assert not on()
        assert not on()
    assert on() is setting
    with pytest.raises(ValueError), attention_of_any_length():
        raise ValueError
    assert on() is setting


def test_the_last_of_several_restores_it(setting):
    inside, go = threading.Event(), threading.Event()

    def other():
        with attention_of_any_length():
            inside.set()
            go.wait(10)

    thread = threading.Thread(target=other)
    with attention_of_any_length():
        thread.start()
        assert inside.wait(10)
    assert not on(), "the other one goes on"
    go.set()
    thread.join()
    assert on() is setting
