"""One description per system: what to install, how to start one replica of the echo, what to kill.

In commands and environments `{bin}`, `{apps}`, `{work}`, `{port}` and `{admin_port}` are filled in
at each start. What is not named here is the system's default, access logs included; telemetry is
off.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A kind of process to kill, and how the system is started for it.

    `where` is a path into `greenroom status --json`; empty means the process that runs user code,
    which names itself in its answers.
    """

    name: str
    where: tuple[str, ...] = ()
    extra_arguments: tuple[str, ...] = ()


USER_CODE = Victim(name="worker")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class System:
    """A serving system under test.

    `loosened` names dependencies of the first requirement whose bounds are dropped.
    """

    name: str
    command: tuple[str, ...]
    requirements: tuple[str, ...] = ()
    loosened: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_command: tuple[str, ...] = ()
    status_command: tuple[str, ...] = ()
    echo_path: str = "/echo"
    alive_path: str = "/echo"
    alive_method: str = "GET"
    victims: tuple[Victim, ...] = (USER_CODE,)
    is_greenroom: bool = False


GREENROOM = System(
    name="greenroom",
    requirements=("uvloop",),  # as our image has it, and as peers bring it
    command=(
        "{bin}/greenroom",
        "run",
        "greenroom_app:app",
        "--app-dir",
        "{apps}",
        "--non-blocking",
    ),
    stop_command=("{bin}/greenroom", "stop"),
    status_command=("{bin}/greenroom", "status", "--json"),
    environment={
        "GREENROOM_STATE_DIR": "{work}/state",
        "GREENROOM_HTTP_PORT": "{port}",
        "GREENROOM_ADMIN_PORT": "{admin_port}",
    },
    echo_path="/",
    alive_path="/",
    is_greenroom=True,
    victims=(
        Victim(name="replica", where=("applications", "*", "deployments", "*", "replicas", "pid")),
        Victim(name="controller", where=("controller", "pid")),
        Victim(name="router", where=("hosts", "proxy", "pid")),
        Victim(name="gunicorn worker", where=("hosts", "front", "workers")),
    ),
)


def _running(app: str) -> tuple[str, ...]:
    return tuple(app if word == "greenroom_app:app" else word for word in GREENROOM.command)


WITHOUT_UVLOOP = replace(GREENROOM, name="greenroom-asyncio", requirements=())
SYNC = replace(GREENROOM, name="greenroom-sync", command=_running("greenroom_app:sync"))
# Without the short way, so that Falcon answers.
THROUGH_FALCON = replace(
    GREENROOM,
    name="greenroom-falcon",
    environment=GREENROOM.environment | {"GREENROOM_HTTP_SHORT_WAY": "off"},
)
FASTAPI = replace(
    GREENROOM,
    name="greenroom-fastapi",
    requirements=("fastapi", "uvloop"),
    command=_running("greenroom_fastapi:app"),
    echo_path="/echo",
    alive_path="/echo",
)

UVICORN = System(
    name="uvicorn-fastapi",
    requirements=("fastapi", "uvicorn[standard]==0.54.0"),
    command=(
        "{bin}/uvicorn",
        "--app-dir",
        "{apps}",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
        "fastapi_app:api",
    ),
)

RAY = System(
    name="ray",
    requirements=("ray[serve]==2.60.0",),
    command=("{bin}/python", "{apps}/ray_app.py", "{port}"),
    environment={"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": "{work}"},
    echo_path="/",
    alive_path="/",
    victims=(Victim(name="replica"),),
)

# Behind the HAProxy that it brings, and its own settings for throughput: its fastest.
RAY_FAST = replace(
    RAY,
    name="ray-fast",
    requirements=("ray[serve,haproxy]==2.60.0",),
    environment=RAY.environment
    | {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
)

LITSERVE = System(
    name="litserve",
    requirements=("litserve==0.2.19",),
    command=("{bin}/python", "{apps}/litserve_app.py", "{port}"),
    alive_method="POST",
    victims=(
        USER_CODE,
        # Off by default, and without it LitServe shuts down on purpose: so both are shown.
        Victim(name="worker, restart_workers=True", extra_arguments=("--restart-workers",)),
    ),
)

BENTOML = System(
    name="bentoml",
    requirements=("bentoml==1.4.40",),
    # It asks for certifi>=2026.10.19, which PyPI mirrors a few weeks old do not have. Certifi is
    # its CA bundle for outgoing HTTPS, and this benchmark makes no such call.
    loosened=("certifi",),
    command=(
        "{bin}/bentoml",
        "serve",
        "bentoml_app:Echo",
        "--working-dir",
        "{apps}",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
    ),
    environment={"BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": "{work}"},
    alive_path="/alive/pid",
)

MOSEC = System(
    name="mosec",
    requirements=("mosec==0.9.8",),
    command=("{bin}/python", "{apps}/mosec_app.py", "--address", "127.0.0.1", "--port", "{port}"),
    alive_method="POST",
)

FALCON = System(
    name="falcon",
    requirements=("falcon==4.4.0", "gunicorn==27.0.1"),
    command=(
        "{bin}/gunicorn",
        "-k",
        "asgi",
        "-w",
        "1",
        "--no-control-socket",
        "--bind",
        "127.0.0.1:{port}",
        "--chdir",
        "{apps}",
        "falcon_app:app",
    ),
)

PEERS = {
    system.name: system
    for system in (
        RAY,
        RAY_FAST,
        LITSERVE,
        BENTOML,
        MOSEC,
        FALCON,
        UVICORN,
        WITHOUT_UVLOOP,
        SYNC,
        THROUGH_FALCON,
        FASTAPI,
    )
}
