"""nginx with the sample configuration in deploy/, in front of fronts that tests have started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.programs import needed

SAMPLE = Path(__file__).parents[2] / "deploy" / "nginx" / "greenroom.conf"
CONFIG = """\
pid {folder}/nginx.pid;
daemon off;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/greenroom.conf;
    {more}
}}
"""


def balancer_command(
    folder: Path, fronts: Sequence[str], listen: str, log: Path, *, main: str = "", more: str = ""
) -> list[str]:
    """Write the configuration for fronts at HOST:PORT into a folder; return how nginx is run.

    ``main`` and ``more`` are directives for the whole of nginx, and for its HTTP.
    """
    first, second = (f"    server 10.0.0.{n}:8000 fail_timeout=1s;\n" for n in (11, 12))
    servers = "".join(first.replace("10.0.0.11:8000", front) for front in fronts)
    text = SAMPLE.read_text()
    for there, here in ((first, servers), (second, ""), ("listen 80", f"listen {listen}")):
        assert there in text
        text = text.replace(there, here)
    (folder / "greenroom.conf").write_text(text)
    config = folder / "nginx.conf"
    config.write_text(main + CONFIG.format(folder=folder, more=more))
    nginx = needed("nginx", "nginx-light")
    return [nginx, "-p", str(folder), "-c", str(config), "-e", str(log)]
