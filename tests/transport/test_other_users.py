"""What a process of another user can do to ours over Unix sockets: nothing that matters."""

import re
from contextlib import contextmanager

import pytest
from thespian.actors import ActorAddress

from greenroom.actors.host.process import start_actor_system
from greenroom.actors.runtime.processes import this_process
from greenroom.actors.runtime.settings import HostSettings
from greenroom.actors.transport import admission, sockets
from greenroom.actors.transport.addresses import ProcessAddress, host_of_admin
from greenroom.actors.transport.thespian_base import Naming
from greenroom.core.errors import StartError
from tests.support.another_user import NOBODY, another_user
from tests.transport.worlds import HOST

SQUATS = {
    "listens": "squatter.listen(5)",
    "never listens": "pass",
    "has a full backlog": """
squatter.listen(0)
waiting = socket.socket(socket.AF_UNIX)
waiting.connect(name)
""",
}
SQUAT = """
name = sys.argv[1].replace("@", chr(0))
squatter = socket.socket(socket.AF_UNIX)
squatter.bind(name)
{how}
print("ready", flush=True)
time.sleep(60)
"""
FLOOD = """
name = sys.argv[1].replace("@", chr(0))
print("ready", flush=True)
end = time.monotonic() + 60
while time.monotonic() < end:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        try:
            sock.connect(name)
        except OSError:
            time.sleep(0.001)
"""


def shown(address):
    return address.socket_name.decode().replace("\0", "@")


@contextmanager
def squatter(address, how="listens"):
    with another_user(SQUAT.format(how=SQUATS[how]), shown(address)) as process:
        yield process


@pytest.fixture
def admin(port):
    return ProcessAddress(HOST, port)


@pytest.mark.parametrize("how", SQUATS)
def test_a_start_names_who_has_the_name_of_its_admin(admin, how, monkeypatch):
    monkeypatch.setattr(sockets, "ASK_S", 0.1)
    settings = HostSettings(admin_port=admin.number)
    with squatter(admin, how) as process, pytest.raises(StartError) as caught:
        start_actor_system(settings, this_process())
    who = f"pid {process.pid} (" if how == "listens" else "a process that does not answer;"
    assert f"admin port {admin.number} is in use by {who}" in str(caught.value)
    assert "--admin-port" in str(caught.value)


def test_what_another_user_listens_at_is_no_admin(world, admin, caplog):
    elsewhere = ProcessAddress("10.1.2.3", admin.number)
    with squatter(admin), squatter(elsewhere):
        assert not Naming.probeAdmin(ActorAddress(admin))
        assert host_of_admin(admin.number) == HOST
        client = world.process()
        client.send(admin)
        world.until(lambda: client.dead)
    assert f"user {NOBODY}, process" in caplog.text


def test_a_flood_of_another_user_delays_nobody_and_fills_no_log(world, caplog, monkeypatch):
    monkeypatch.setattr(admission, "WINDOW_S", 1.0)

    def logged(text):
        return [each for each in caplog.messages if text in each]

    one, other = world.process(), world.process()
    began_at, longest_s = world.loop.time(), dict[int, float]()  # in each second
    with another_user(FLOOD, shown(other.address)), another_user(FLOOD, shown(other.address)):
        # Two windows and more; on a busy machine the flood may begin late.
        while world.loop.time() < began_at + 2.5 or not logged(" more connections "):
            assert world.loop.time() < began_at + 30
            sent_at, count = world.loop.time(), len(one.done)
            one.send(other)
            world.until(lambda count=count: len(one.done) > count)
            second, took_s = int(sent_at - began_at), world.loop.time() - sent_at
            longest_s[second] = max(longest_s.get(second, 0.0), took_s)
            newcomer = world.process()  # whose connection waits behind those of the flood
            newcomer.send(other)
            world.until(lambda newcomer=newcomer: newcomer.done)
            newcomer.links.close()
    windows = int(world.loop.time() - began_at) + 1
    refused = logged(f"user {NOBODY}, process")
    assert 1 <= len(refused) <= 2 * windows  # in each window, of one user, one line
    (more,) = {re.sub(r"\d+", "N", each) for each in caplog.messages} - {
        re.sub(r"\d+", "N", each) for each in refused
    }
    assert more == "N more connections were refused or failed in the last N s, as the ones above"
    # Some ms. In one second it may be for what else the machine does; the flood is there in more.
    assert max(longest_s.values()) < 5, longest_s
    assert min(longest_s.values()) < 0.5, longest_s
