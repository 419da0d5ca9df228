"""Whom a process obeys: the controller of the latest epoch, and no earlier one again."""

from __future__ import annotations

from greenroom.actors.cluster.epoch_fence import EpochFence, Following
from greenroom.actors.messages.control import Changed, MeetController, Superseded
from greenroom.actors.messages.queries import Process
from tests.support.lone_loop import LoneLoop

OLD, NEW = Process(1, 1, "old"), Process(2, 2, "new")
HOST, LATER_HOST = Process(9, 10, "host"), Process(3, 11, "later host")


def meet(process: Process, epoch: int = 0, *, by: Process = HOST) -> MeetController:
    address = process.incarnation
    return MeetController(controller=address, process=process, by=by, epoch=epoch)


def changed(by: Process, epoch: int, upto: int = 1, *, complete: bool = True) -> Changed:
    return Changed(controller=by, snapshots={}, upto=upto, complete=complete, epoch=epoch)


def test_orders_of_an_earlier_controller_are_refused_and_answered_with_the_later_epoch():
    loop = LoneLoop()
    obedience = EpochFence(loop)
    assert obedience.accepts(3, "old")
    assert obedience.accepts(4, "new")
    assert not obedience.accepts(3, "old")
    assert loop.sent == [("old", Superseded(epoch=4))]
    assert obedience.accepts(0, "one that leads alone")


def test_tables_are_taken_of_the_latest_controller_only():
    loop = LoneLoop()
    following = Following(loop)
    assert following.known() is None
    assert following.takes(changed(OLD, 1), "old")
    assert following.known() == ("old", OLD, 1)
    assert following.takes(changed(NEW, 2), "new")
    assert not following.takes(changed(OLD, 1, upto=9), "old")
    assert not following.meets(meet(OLD, 1))
    assert loop.sent == [("old", Superseded(epoch=2))] * 2
    assert (following.controller, following.known()) == ("new", ("new", NEW, 2))


def test_tables_that_a_newer_one_has_overtaken_or_that_lack_the_rest_are_not_taken():
    following = Following(LoneLoop())
    assert not following.takes(changed(OLD, 0, complete=False), "old")
    assert following.takes(changed(OLD, 0, upto=5), "old")
    following.seen = 5
    assert not following.takes(changed(OLD, 0, upto=4), "old")
    assert not following.takes(changed(NEW, 0, upto=6, complete=False), "new")
    assert following.takes(changed(OLD, 0, upto=6, complete=False), "old")


def test_late_tables_of_a_dead_controller_are_not_taken_after_its_successors():
    following = Following(LoneLoop())
    assert following.meets(meet(OLD))
    assert following.meets(meet(NEW))
    assert following.takes(changed(NEW, 0, upto=2**33), "new")
    following.seen = 2**33
    assert not following.takes(changed(OLD, 0, upto=2**32), "old")
    assert following.known() == ("new", NEW, 0)


def test_tables_of_a_controller_that_began_with_a_restored_backup_are_taken():
    following = Following(LoneLoop())
    assert following.takes(changed(OLD, 0, upto=2**33), "old")
    following.seen = 2**33
    assert following.meets(meet(NEW))
    assert following.takes(changed(NEW, 0, upto=2**32), "new")


def test_what_a_dead_host_process_says_of_a_dead_controller_is_not_believed_when_it_is_late():
    following = Following(LoneLoop())
    assert following.meets(meet(OLD))
    assert following.meets(meet(NEW, by=LATER_HOST))
    assert not following.meets(meet(OLD))
    assert (following.controller, following.known()) == ("new", ("new", NEW, 0))
    assert following.meets(meet(OLD, by=LATER_HOST)), "who lives knows best"
