"""Virtual time goes forward only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import InternalError
from dev.simulation.timeline import Timeline


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=20))
def test_calls_come_in_order_of_their_moments(planned: list[tuple[float, float]]) -> None:
    timeline, seen = Timeline(), list[tuple[float, int, bool]]()

    def call(number: int, again: float | None) -> None:
        seen.append((timeline.now, number, again is None))
        if again is not None:
            timeline.after(again, call, number, None)

    for number, (moment, again) in enumerate(planned):
        timeline.at(moment, call, number, again)
    timeline.run()
    assert [moment for moment, _, _ in seen] == sorted(moment for moment, _, _ in seen)
    assert len(seen) == timeline.num_calls == 2 * len(planned)
    firsts = [(moment, number) for moment, number, is_second in seen if not is_second]
    assert firsts == sorted((moment, number) for number, (moment, _) in enumerate(planned))


def test_the_past_is_over() -> None:
    timeline = Timeline()
    timeline.at(2.0, lambda: timeline.at(1.0, timeline.stop))
    with pytest.raises(InternalError, match=r"at 1\.000000 s, and it is 2\.000000 s"):
        timeline.run()


def test_what_is_left_waits_for_ever() -> None:
    timeline, seen = Timeline(), list[int]()
    timeline.at(1.0, timeline.stop)
    timeline.at(2.0, seen.append, 1)
    timeline.run()
    assert (timeline(), seen) == (1.0, [])
