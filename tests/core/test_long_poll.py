from understudy.core.long_poll import IDS_PER_EPOCH, LongPoll


def ids(news: dict) -> dict[str, int]:
    return {key: snapshot_id for key, (snapshot_id, value) in news.items() if value is not None}


def test_a_first_listen_is_answered_even_with_nothing() -> None:
    poll = LongPoll(1)
    assert poll.listen("p", {}) == {}
    assert not poll.is_parked("p")


def test_a_listener_gets_all_that_it_lacks() -> None:
    poll = LongPoll(1)
    poll.publish("a", 1)
    poll.publish("b", 2)
    news = poll.listen("p", {})
    assert {key: value for key, (_, value) in news.items()} == {"a": 1, "b": 2}
    poll.publish("b", 3)
    assert list(poll.listen("p", ids(news))) == ["b"]


def test_a_listener_that_lacks_nothing_waits_for_news() -> None:
    poll = LongPoll(1)
    poll.publish("a", 1)
    known = ids(poll.listen("p", {}))
    assert poll.listen("p", known) == {}
    assert poll.is_parked("p")
    assert poll.take_news() == {}
    poll.publish("b", 2)
    news = poll.take_news()
    assert list(news["p"]) == ["b"]
    assert news["p"]["b"][0] > known["a"]
    assert not poll.is_parked("p")


def test_news_go_once_and_only_to_who_waits() -> None:
    poll = LongPoll(1)
    poll.listen("p", {})
    poll.listen("p", {})
    poll.listen("busy", {})
    poll.publish("a", 1)
    assert list(poll.take_news()) == ["p"]
    assert poll.take_news() == {}
    assert list(poll.listen("busy", {})) == ["a"], "it asks again, and compares"


def test_publishing_the_same_value_is_no_news() -> None:
    poll = LongPoll(1)
    poll.publish("a", [1])
    known = ids(poll.listen("p", {}))
    poll.listen("p", known)
    poll.take_news()
    poll.publish("a", [1])
    poll.publish("never there", None)
    assert poll.take_news() == {}


def test_a_deleted_key_is_told_to_who_has_it() -> None:
    poll = LongPoll(1)
    poll.publish("a", 1)
    known = ids(poll.listen("p", {}))
    poll.listen("p", known)
    poll.publish("a", None)
    assert poll.take_news() == {"p": {"a": (0, None)}}
    assert poll.listen("late", known) == {"a": (0, None)}
    assert poll.listen("new", {}) == {}


def test_a_key_that_comes_back_has_a_newer_id() -> None:
    poll = LongPoll(1)
    poll.publish("a", 1)
    first = ids(poll.listen("p", {}))["a"]
    poll.publish("a", None)
    poll.publish("a", 1)
    assert ids(poll.listen("p", {}))["a"] > first


def test_ids_of_a_later_epoch_are_newer_than_all_earlier_ones() -> None:
    earlier, later = LongPoll(1), LongPoll(2)
    for poll in (earlier, later):
        poll.publish("a", 1)
    known = ids(earlier.listen("p", {}))
    news = later.listen("p", known)
    assert news["a"][0] > known["a"]
    assert news["a"][0] > 2 * IDS_PER_EPOCH


def test_a_restarted_listener_gets_everything_again() -> None:
    poll = LongPoll(1)
    poll.publish("a", 1)
    poll.listen("p", ids(poll.listen("p", {})))
    assert list(poll.listen("p", {})) == ["a"]


def test_a_key_is_held_when_all_have_said_that_they_hold_it() -> None:
    poll = LongPoll(1)
    poll.publish("a", 1)
    known = ids(poll.listen("p", {}))
    assert not poll.held_by_all("a"), "told, but not confirmed"
    poll.listen("p", known)
    assert poll.held_by_all("a")
    poll.listen("q", {})
    assert not poll.held_by_all("a")
    poll.forget("q")
    assert poll.held_by_all("a")
    poll.publish("a", 2)
    assert not poll.held_by_all("a")


def test_a_deletion_is_held_when_nobody_has_the_key() -> None:
    poll = LongPoll(1)
    poll.publish("a", 1)
    poll.listen("p", ids(poll.listen("p", {})))
    poll.publish("a", None)
    assert not poll.held_by_all("a")
    poll.listen("p", {})
    assert poll.held_by_all("a")


def test_without_listeners_nothing_is_held() -> None:
    poll = LongPoll(1)
    poll.publish("a", 1)
    assert not poll.held_by_all("a")


def test_a_forgotten_listener_gets_no_news() -> None:
    poll = LongPoll(1)
    poll.listen("p", {})
    poll.listen("p", {})
    poll.forget("p")
    poll.forget("p")
    poll.publish("a", 1)
    assert poll.take_news() == {}


def test_a_closed_long_poll_answers_when_it_is_opened() -> None:
    poll = LongPoll(2, closed=True)
    poll.publish("a", 1)
    assert poll.listen("p", {"gone": 7}) == {}
    assert poll.listen("empty", {}) == {}
    assert poll.is_parked("p")
    assert poll.take_news() == {}
    assert not poll.held_by_all("a")
    poll.open()
    news = poll.take_news()
    assert {key: value for key, (_, value) in news["p"].items()} == {"a": 1, "gone": None}
    assert list(news["empty"]) == ["a"]
    assert poll.take_news() == {}
