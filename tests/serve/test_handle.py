import asyncio
import copy
import pickle
import threading

import cloudpickle
import pytest

from greenroom.actors.caller import client as query_client
from greenroom.actors.messages.queries import FailedAnswer, HttpAnswer, ValueAnswer
from greenroom.serve.exceptions import (
    BackPressureError,
    GreenroomError,
    InvalidRequestError,
    NotRunningError,
    RequestCancelledError,
    UserCodeError,
)
from greenroom.serve.handle import DeploymentHandle, decode

pytestmark = pytest.mark.anyio


class OddError(Exception):
    pass


class FragileError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class Counted:
    unpickled = 0

    def __reduce__(self):
        return _counted, ()


def _counted():
    Counted.unpickled += 1
    return Counted()


class Model:
    def __call__(self, *args, **kwargs):
        return args, kwargs

    def double(self, x):
        return 2 * x

    def fail(self):
        raise OddError("odd")

    def fail_fragile(self):
        raise FragileError(1, 2)


def test_a_handle_that_another_release_has_stored_with_more_options_is_read():
    restore, (name, app, options) = DeploymentHandle("M", "a").options(stream=True).__reduce__()
    read = restore(name, app, {**options, "of_the_next_release": 1})
    assert read == DeploymentHandle("M", "a").options(stream=True)


@pytest.fixture
def queries(controller):
    controller.instances["a#Model"] = Model()
    return controller.queries


@pytest.fixture
def handle(queries):
    return DeploymentHandle("Model", "a")


def test_a_call_returns_its_value_with_its_request_id(handle, queries):
    response = handle.remote(1, key="x")
    assert response.result() == ((1,), {"key": "x"})
    (query,) = queries.submitted
    assert query.request_id == response.request_id
    assert (query.endpoint, query.call_method) == ("a#Model", "")
    assert query.retryable is None


def test_a_method_is_called_by_name_or_by_option(handle, queries):
    assert handle.double.remote(4).result() == 8
    assert handle.options(method_name="double").remote(5).result() == 10
    assert [query.call_method for query in queries.submitted] == ["double", "double"]


def test_options_travel_with_the_query(handle, queries):
    options = {"shard_key": "k", "retryable": True, "multiplexed_model_id": "m"}
    handle.options(**options).double.remote(1).result()
    (query,) = queries.submitted
    assert (query.shard_key, query.retryable) == ("k", True)
    assert query.multiplexed_model_id == "m"


def test_options_that_mean_not_used_are_taken(handle):
    assert handle.options(stream=False, multiplexed_model_id="") == handle


def test_a_handle_survives_pickling_and_copying(handle):
    other = handle.options(method_name="double", shard_key="k")
    for again in (pickle.loads(pickle.dumps(other)), copy.deepcopy(other)):
        assert again == other
        assert hash(again) == hash(other)
        assert again.remote(3).result() == 6
    assert other != handle
    assert b"Options" not in pickle.dumps(other), "which another release may have otherwise"
    assert repr(other) == "DeploymentHandle('a#Model.double')"
    assert not hasattr(handle, "__array__")


def test_calling_a_handle_directly_is_an_error_that_says_what_to_do(handle):
    with pytest.raises(TypeError, match=r"a#Model with \.remote"):
        handle()


def test_a_handle_without_an_application_calls_an_endpoint(handle, queries):
    queries.controller.instances["plain"] = Model()
    assert DeploymentHandle("plain", None).double.remote(1).result() == 2


def test_in_a_replica_handles_use_the_replicas_own_client(handle, queries, system):
    system.running = False
    with pytest.raises(NotRunningError):
        handle.remote()
    query_client.install(queries)
    try:
        assert handle.double.remote(1).result() == 2
    finally:
        query_client.install(None)


def test_an_exception_of_user_code_keeps_its_type_and_its_traceback(handle):
    response = handle.fail.remote()
    for _ in range(2):
        with pytest.raises(OddError, match="odd") as caught:
            response.result()
        (note,) = caught.value.__notes__
        assert "in a#Model.fail, on its replica:" in note
        assert 'raise OddError("odd")' in note


def test_an_exception_that_cannot_be_unpickled_arrives_as_text(handle):
    with pytest.raises(UserCodeError, match="1 2") as caught:
        handle.fail_fragile.remote().result()
    assert "raise FragileError(1, 2)" in caught.value.__notes__[0]


def test_a_failure_of_ours_is_raised_as_its_kind():
    outcome = decode(FailedAnswer(1, "BackPressureError", "full", retry_after_s=7.0), "a#b")
    assert isinstance(outcome.error, BackPressureError)
    assert outcome.error.retry_after_s == 7.0
    outcome = decode(FailedAnswer(1, "MethodNotAllowedError", "no", allowed=("GET",)), "a#b")
    assert outcome.error.allowed == ("GET",)


def test_answers_that_make_no_sense_are_errors():
    assert isinstance(decode(HttpAnswer(1, 200, (), b""), "a#b").error, GreenroomError)
    failed = decode(ValueAnswer(1, b"junk"), "a#b").error
    assert isinstance(failed, UserCodeError)
    assert "the result of a#b cannot be unpickled here" in str(failed)
    odd = FailedAnswer(1, "UserCodeError", "text", exception=cloudpickle.dumps("no exception"))
    assert isinstance(decode(odd, "a#b").error, UserCodeError)


def test_waiting_too_long_is_a_timeout_and_the_call_goes_on(handle, queries):
    queries.hold = True
    response = handle.double.remote(1)
    with pytest.raises(TimeoutError, match=r"a#Model.double has not answered within 0.01 s"):
        response.result(timeout_s=0.01)
    assert "pending" in repr(response)
    queries.release()
    assert response.result(timeout_s=0) == 2
    assert "done" in repr(response)


async def test_a_response_can_be_awaited_more_than_once(handle, queries):
    queries.hold = True
    response = handle.double.remote(1)
    asyncio.get_running_loop().call_soon(queries.release)
    assert (await response, await response) == (2, 2)


async def test_an_awaited_response_raises_what_user_code_raised(handle):
    with pytest.raises(OddError):
        await handle.fail.remote()


async def test_result_inside_an_event_loop_is_refused(handle):
    with pytest.raises(RuntimeError, match="would block the running event loop; await"):
        handle.remote().result()


def test_cancelling_cancels_the_query(handle, queries):
    queries.hold = True
    response = handle.remote()
    assert not response.cancelled()
    response.cancel()
    assert response.cancelled()
    assert queries.cancelled == [1]
    with pytest.raises(RequestCancelledError, match=response.request_id):
        response.result()


def test_cancelling_too_late_leaves_the_value(handle):
    response = handle.double.remote(1)
    response.cancel()
    assert response.cancelled()
    assert response.result() == 2


async def test_cancelling_the_task_that_awaits_cancels_the_query(handle, queries):
    queries.hold = True
    response = handle.remote()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(response, 0.01)
    assert response.cancelled()
    assert queries.cancelled == [1]


def test_an_answer_after_its_event_loop_was_closed_harms_nobody(handle, queries):
    queries.hold = True
    waits = awaited(handle.remote())
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it would tell of the pending task
    task = loop.create_task(waits)
    loop.run_until_complete(asyncio.sleep(0))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert not task.done()
    loop.close()
    queries.release()
    with pytest.raises(RuntimeError):
        waits.throw(RuntimeError)


def test_a_response_as_an_argument_is_resolved_without_blocking_the_caller(handle, queries):
    queries.hold = True
    first, other = handle.double.remote(1), handle.double.remote(2)
    second = handle.remote(first, key=other)
    assert len(queries.submitted) == 2
    assert ", pending, " in repr(second)
    queries.release()
    assert second.result(timeout_s=5) == ((2,), {"key": 4})
    assert queries.submitted[-1].request_id == second.request_id


def test_what_is_passed_on_is_unpickled_only_where_it_arrives(handle, queries):
    queries.controller.instances["a#Model"].spy = Counted
    Counted.unpickled = 0
    response = handle.remote(handle.options(method_name="spy").remote(), 1)
    (args, _) = response.result(timeout_s=5)
    assert isinstance(args[0], Counted)
    assert Counted.unpickled == 2, "by the replica, and with the result"


def test_arguments_are_those_of_the_time_of_the_call(handle, queries):
    queries.hold = True
    numbers = [1]
    response = handle.remote(numbers, handle.double.remote(1))
    numbers.append(2)
    queries.release()
    assert response.result(timeout_s=5) == (([1], 2), {})


def test_a_bad_argument_is_refused_at_once_also_with_a_response(handle, queries):
    queries.hold = True
    with pytest.raises(InvalidRequestError, match="argument 2"):
        handle.remote(handle.double.remote(1), threading.Lock())


def test_a_failed_argument_fails_the_call(handle, queries):
    response = handle.double.remote(handle.fail.remote())
    with pytest.raises(OddError):
        response.result(timeout_s=5)
    assert len(queries.submitted) == 1


def test_cancelling_a_call_that_waits_for_its_arguments_keeps_it_from_being_sent(handle, queries):
    queries.hold = True
    first = handle.double.remote(1)
    second = handle.double.remote(first)
    second.cancel()
    queries.release()
    with pytest.raises(RequestCancelledError):
        second.result(timeout_s=5)
    assert first.result() == 2
    assert len(queries.submitted) == 1


def test_a_cancelled_argument_fails_the_call(handle, queries):
    queries.hold = True
    first = handle.double.remote(1)
    second = handle.double.remote(first)
    first.cancel()
    with pytest.raises(RequestCancelledError, match=r"call to a#Model.double was cancelled"):
        second.result(timeout_s=5)


def test_a_call_that_cannot_be_sent_when_its_arguments_have_come_fails(handle, queries):
    queries.hold = True
    first = handle.double.remote(1)
    second = handle.double.remote(first)

    def refuse(query, pending):
        raise NotRunningError("closed")

    queries.send = refuse
    queries.release()
    with pytest.raises(NotRunningError, match="closed"):
        second.result(timeout_s=5)


def test_cancelling_a_chained_call_under_way_cancels_its_query(handle, queries):
    first = handle.double.remote(1)
    assert first.result() == 2
    queries.hold = True
    second = handle.double.remote(first)
    second.cancel()
    assert queries.cancelled == [2]
    with pytest.raises(RequestCancelledError):
        second.result(timeout_s=5)


def test_a_response_inside_another_argument_is_refused(handle):
    with pytest.raises(InvalidRequestError, match="must be an argument of its own"):
        handle.remote([handle.remote()])


async def test_many_tasks_can_wait_at_once(handle, queries):
    queries.hold = True
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(awaited(handle.double.remote(n))) for n in range(50)]
        asyncio.get_running_loop().call_later(0.01, queries.release)
    assert [task.result() for task in tasks] == [2 * n for n in range(50)]


async def awaited(response):
    return await response
