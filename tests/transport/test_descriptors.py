"""What a forked child has of its parent's descriptors."""

from __future__ import annotations

import logging
import os
import resource
import select
import socket

from greenroom.actors.transport import descriptors


def in_child(action) -> bytes:
    """Return what ``action`` returns in a forked child, as text."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(write_fd, repr(action()).encode())
        os._exit(0)
    os.close(write_fd)
    answer = b""
    while chunk := os.read(read_fd, 65536):
        answer += chunk
    os.close(read_fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return answer


def is_null(fd: int) -> bool:
    return os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev


def test_a_child_that_lets_go_leaves_the_parents_descriptors_open():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = theirs.fileno()

        def let_go():
            descriptors.let_go([fd])
            return is_null(fd)

        assert in_child(let_go) == b"True"
        theirs.send(b"still here")
        assert ours.recv(100) == b"still here"


def test_a_number_let_go_is_not_given_to_the_next_file():
    read_fd, write_fd = os.pipe()

    def let_go():
        descriptors.let_go([read_fd, write_fd])
        return os.open("/", os.O_RDONLY) in {read_fd, write_fd}

    assert in_child(let_go) == b"False"
    os.close(read_fd)
    os.close(write_fd)


def test_a_number_above_the_limit_of_open_files_is_let_go_too():
    read_fd, write_fd = os.pipe()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def let_go():
        number = os.dup2(write_fd, soft - 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        descriptors.let_go([write_fd, number])
        return select.select([read_fd], [], [], 0)[0] == [read_fd]

    assert in_child(let_go) == b"False"  # the parent has it still
    os.close(write_fd)
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)


def test_standard_streams_are_not_let_go():
    assert not {0, 1, 2} & set(descriptors.inheritable())


def test_log_files_are_not_let_go(tmp_path):
    handler = logging.FileHandler(tmp_path / "log")
    logger = logging.getLogger("greenroom.tests.descriptors")
    logger.addHandler(handler)
    assert handler.stream.fileno() not in descriptors.inheritable()
    logger.removeHandler(handler)
    assert handler.stream.fileno() in descriptors.inheritable()
    handler.close()


class Holder:
    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def descriptors(self) -> list[int]:
        return self.numbers


def test_any_fork_lets_go_of_what_a_transport_holds():
    read_fd, write_fd = os.pipe()
    holder = Holder(read_fd)
    descriptors.release_in_children(holder)
    assert in_child(lambda: (is_null(read_fd), is_null(write_fd))) == b"(True, False)"
    assert not is_null(read_fd)
    holder.numbers.clear()
    os.close(read_fd)
    os.close(write_fd)


def test_numbers_that_are_not_open_are_left_alone():
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    descriptors.let_go([write_fd])
    os.close(read_fd)
    assert not os.path.exists(f"/proc/self/fd/{write_fd}")
