"""deploy/systemd: systemd accepts the unit, and its settings are Greenroom's."""

import configparser
import re
import subprocess
import sys

from greenroom.actors.runtime.cgroups import SUBGROUP
from greenroom.actors.runtime.draining import DEFAULT_S, stop_s
from greenroom.actors.runtime.settings import FIELDS, variable
from tests.support.container import ROOT
from tests.support.programs import needed

UNIT = ROOT / "deploy" / "systemd" / "greenroom.service"


def test_systemd_accepts_the_unit(tmp_path):
    analyze = needed("systemd-analyze", "systemd")
    # It asks that the program is there.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/greenroom/bin/greenroom", sys.executable))
    done = subprocess.run(
        [analyze, "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_its_variables_are_settings_and_a_stop_has_the_time_that_it_needs():
    text = UNIT.read_text()
    names = re.findall(r"^Environment=(\w+)=", text, re.MULTILINE)
    assert set(names) <= {variable(name) for name in FIELDS}
    parser = configparser.ConfigParser(strict=False)
    parser.read_string(text)
    assert parser.getint("Service", "TimeoutStopSec") > stop_s(DEFAULT_S)
    assert parser["Service"]["KillMode"] == "process"


def test_the_limits_hand_on_the_group_in_which_hosts_look_for_it():
    parser = configparser.ConfigParser()
    parser.read_string((UNIT.parent / "limits.conf").read_text())
    assert parser["Service"]["DelegateSubgroup"] == SUBGROUP
    assert set(parser["Service"]["Delegate"].split()) == {"memory", "cpu"}
    assert parser["Service"]["ProtectControlGroups"] == "false"


def test_it_is_exposed_to_little():
    """As the systemd of the machine counts it, out of 10; "OK" is below 5."""
    analyze = needed("systemd-analyze", "systemd")
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--threshold=39", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
