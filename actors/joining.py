"""How a host process finds its cluster's controller, and what to say where it cannot."""

from __future__ import annotations

from collections.abc import Callable

from thespian.actors import ActorAddress

from greenroom.actors.binding import resolved_gates
from greenroom.actors.candidate import Candidate
from greenroom.actors.membership import Membership
from greenroom.actors.port import CONTROLLER, Finder, ThreadPort
from greenroom.actors.settings import HostSettings
from greenroom.actors.transport.addresses import parse_address


def find_controller(
    port: ThreadPort,
    settings: HostSettings,
    membership: Membership,
    on_found: Callable[[], None],
) -> Finder | Candidate:
    """Return what finds the controller, not started: on this host, on others, or on either."""
    finder: Finder | Candidate
    if settings.leaders:
        finder = Candidate(
            port,
            settings,
            lambda *_: on_found(),
            membership.lost_controller,
            membership.silent_s,
            lambda: membership.hosts,
        )
    else:
        given = resolved_gates(settings)

        def gates() -> list[ActorAddress]:
            every = dict.fromkeys((*given, *membership.hosts)) if given else ()
            return [ActorAddress(parse_address(gate)) for gate in every]

        finder = Finder(port, CONTROLLER, lambda *_: on_found(), membership.lost_controller, gates)
    membership.on_silence = finder.doubt
    return finder


def leads(settings: HostSettings, controller: Finder | Candidate) -> bool:
    """Tell whether the controller belongs on this host at present."""
    return controller.leads if isinstance(controller, Candidate) else settings.join is None


def obstacle(settings: HostSettings, controller: Finder | Candidate, membership: Membership) -> str:
    """Return why this host will not join or lead; "" while it still may."""
    trouble = membership.trouble
    if isinstance(controller, Candidate) and controller.never_led:
        trouble = controller.refusal or trouble
    if not trouble:
        return ""
    if isinstance(controller, Candidate) and not membership.is_refused:
        if not controller.never_led:
            return ""  # it will lead itself, if nobody else does
        first = settings.leader_addresses[0]
        begin = "" if first == settings.own_address else f"start {first} first, or "
        trouble += (
            f"; and nobody has led from the state dir {settings.state_dir} yet, where only the "
            f"first of --leaders may begin: {begin}name the folder that all leaders share with "
            "--state-dir"
        )
    return f"cannot join {', '.join(settings.gates)}: {trouble}"
