"""The closing frames of WebSockets."""

import pytest

from greenroom.actors.messages.closing import MAX_REASON_BYTES, check_code, close_frame, close_of


def test_a_close_travels_as_it_is_and_a_long_reason_loses_its_end():
    assert close_of(close_frame(4321, "lunch")) == (4321, "lunch")
    assert close_of(close_frame(1000)) == (1000, "")
    frame = close_frame(1000, "ä" * 100)
    assert len(frame) == 2 + MAX_REASON_BYTES - 1, "no half of a character is sent"
    assert close_of(frame) == (1000, "ä" * 61)


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 2999, 5000, 99999])
def test_a_code_that_may_not_be_sent_is_refused_naming_it(code):
    with pytest.raises(ValueError, match=str(code)):
        check_code(code)


@pytest.mark.parametrize("code", [1000, 1003, 1007, 1014, 3000, 4999])
def test_other_codes_may_be_sent(code):
    check_code(code)
