"""Carries out a plan, host by host, and says so."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from greenroom.core.errors import GreenroomError
from greenroom.core.operations import EXIT_CHANGES
from greenroom.serve.admin.reports import problems_of
from greenroom.serve.code.runtime_env import files_in
from greenroom.serve.config_file import variables_in
from greenroom.serve.up.hosts_file import HostsFile, Target
from greenroom.serve.up.plan import RUNNING, Does, Found, FoundHost, Step, plan, problems
from greenroom.serve.up.ssh import HostError, Ssh, UnreachableError

CHECK_EVERY_S = 0.5
HEALTHY_TIMEOUT_S = 60.0
_UNDER_WAY = re.compile(r" is (UPDATING|DEPLOYING|DELETING)\b")


class Run:
    """One run of the command; ``say`` gets a line for each thing that was done."""

    def __init__(
        self,
        file: HostsFile,
        ssh: Ssh,
        say: Callable[[str], None],
        timeout_s: float = HEALTHY_TIMEOUT_S,
    ) -> None:
        self._file, self._ssh, self._say, self._timeout_s = file, ssh, say, timeout_s
        self._targets = dict(file.targets)
        found = self._on_each(self._targets, lambda name: FoundHost(**self._on(name, "inspect")))
        self._found = Found(found, self._first_report(found))
        self._leads = self._found.leader if self._found.leader in found else file.leads
        for name, had in self._found.had.items():
            self._targets.setdefault(name, Target(name, had["ssh"], had["dir"], had["python"]))

    def plan(self) -> list[Step]:
        """Return what would be done; GreenroomError for what stands in the way."""
        steps = self._steps()
        if self._file.deploy is None:
            return steps
        if self._found.states.get(self._leads) != RUNNING:
            return [*steps, Step(Does.DEPLOY, self._leads, f" {self._file.deploy.name}")]
        code, output, error = self._deploy("--plan")
        if code not in (0, EXIT_CHANGES):
            raise self._failure(output, error)
        changes = output.splitlines()[:-1] if code == EXIT_CHANGES else ()
        return [*steps, *(Step(Does.DEPLOY, self._leads, f": {change}") for change in changes)]

    def up(self) -> bool:
        """Do what is to be done, and return whether that was anything.

        Raises GreenroomError at the first host on which something fails. What was done stays, and
        the next run goes on from there.
        """
        steps = self._steps()
        installs = [step.host for step in steps if step.does == Does.INSTALL]
        changes = [step for step in steps if step.does in (Does.START, Does.RESTART)]
        leavers = [step.host for step in steps if step.does == Does.REMOVE]
        self._on_each(installs, self._install)
        if steps:
            self._record({**self._found.had, **self._had()})
        # One after the other, but those that start and do not lead at once.
        for is_alone, several in groupby(changes, self._is_alone):
            for group in [[step] for step in several] if is_alone else [list(several)]:
                change = partial(self._change, kind=group[0].does)
                self._on_each([step.host for step in group], change)
        for name in leavers:
            self._remove(name)
        if leavers:
            self._record(self._had())
        is_new = self._deploy_all()
        if changes and self._found.report:
            self._greenroom("rebalance")
        self._wait_healthy(list(self._file.hosts), set())
        return bool(steps) or is_new

    def down(self, *, delete: bool) -> None:
        """Stop all hosts, the one that leads last; ``delete`` what is on them too."""
        others = [name for name in self._targets if name != self._leads]
        for group in (others, [self._leads]):
            self._on_each(group, lambda name: self._on(name, "stop", delete=delete))
            for name in group:
                self._say(f"{name}: {'removed' if delete else 'stopped'}")

    def _steps(self) -> list[Step]:
        if wrong := list(problems(self._file.hosts, self._found)):
            raise GreenroomError("\n".join(wrong))
        return plan(self._file.hosts, self._found, self._leads)

    def _is_alone(self, step: Step) -> bool:
        return step.does == Does.RESTART or step.host == self._leads

    # --- Steps ------------------------------------------------------------------------------------

    def _install(self, name: str) -> None:
        wheels, has = self._file.wheels, self._found.hosts[name].wheels
        lacks = [file for file, digest in wheels.files.items() if has.get(file) != digest]
        release = self._file.hosts[name].release
        self._say(f"{name}: installing {release}, {len(lacks)} of its wheels are sent")
        began_at = time.monotonic()
        self._on(name, "receive", {file: wheels.folder / file for file in lacks})
        files, needs = list(wheels.files), wheels.requirements
        self._on(name, "install", release=release, wheels=files, requirements=needs)
        self._say(f"{name}: installed in {time.monotonic() - began_at:.1f} s")

    def _record(self, had: Mapping[str, Any]) -> None:
        """Give all hosts the cluster file, made if there is none, and the hosts that there are."""
        release = self._file.hosts[self._leads].release
        key = self._found.key or self._on(self._leads, "make_key", release=release)
        self._on_each(self._file.hosts, lambda name: self._on(name, "record", hosts=had, key=key))

    def _had(self) -> dict[str, Any]:
        """Return the hosts of the file as the next run is to find them."""
        had = {}
        for name, host in self._file.hosts.items():
            leads = name == self._file.leads and "GREENROOM_STORE" not in host.environ
            had[name] = {**host.target._asdict(), "leads": leads}
        return had

    def _change(self, name: str, kind: Does) -> None:
        """Start a host's generation, and wait until it is healthy; else go back."""
        host, before = self._file.hosts[name], self._found.hosts[name].healthy
        report = self._report() if kind == Does.RESTART else {}
        known = {_subject(line) for line in problems_of(report)} if report else None
        self._say(f"{name}: {kind}ing {host.generation}")
        began_at = time.monotonic()
        try:
            wanted = {"generation": host.generation, "release": host.release}
            self._on(name, "start", None, environ=host.environ, **wanted)
            self._wait_healthy([name], known)
        except UnreachableError:
            raise
        except GreenroomError as error:
            if before in ("", host.generation):
                raise
            self._go_back(name, before, error)
        self._on(name, "confirm")
        self._say(f"{name}: healthy after {time.monotonic() - began_at:.1f} s")

    def _go_back(self, name: str, before: str, error: GreenroomError) -> NoReturn:
        self._say(f"{name}: going back to {before}")
        try:
            self._on(name, "start", generation=before, release="", environ={})
        except GreenroomError as another:
            raise HostError(f"{error}\nit could not go back to {before}: {another}") from error
        raise HostError(
            f"{error}\nhost {name!r} is back at {before}, and no other host was changed after it; "
            "the same command goes on once the reason is gone"
        ) from error

    def _remove(self, name: str) -> None:
        """Take a host out of the cluster, and what is on it away."""
        state = self._found.states.get(name)
        if state == RUNNING:
            self._greenroom("drain", name)
            self._say(f"{name}: drained")
        try:
            self._on(name, "stop", delete=True)
        except UnreachableError as error:
            if state == RUNNING:
                raise
            self._say(f"{name}: what it has stays there: {error}")
            if state is not None:
                self._greenroom("evict", name)
        self._say(f"{name}: removed")

    # --- The cluster ------------------------------------------------------------------------------

    def _report(self) -> dict[str, Any]:
        return dict(self._on(self._leads, "report") or {})

    def _first_report(self, found: Mapping[str, FoundHost]) -> dict[str, Any]:
        """Return what the cluster says of itself: the first host most likely knows."""
        names = [name for name, has in found.items() if has.generation]
        for group in (names[:1], names[1:]):
            reports = self._on_each(group, lambda name: self._on(name, "report"))
            if report := next(filter(None, reports.values()), None):
                return dict(report)
        return {}

    def _wait_healthy(self, names: Iterable[str], known: set[str] | None) -> None:
        """Wait until hosts run, and no problem is there but the known ones; None for any.

        What the controller is still at, such as replicas that load a model, is waited for without
        a limit, and said.
        """
        deadline, said = time.monotonic() + self._timeout_s, set[str]()
        while True:
            report = self._report()
            states = {each["name"]: each["state"] for each in report.get("hosts", ())}
            not_there = [name for name in names if states.get(name) != RUNNING]
            problems = [f"host {n!r} is {states.get(n, 'not in the cluster')}" for n in not_there]
            if known is not None:
                problems += [line for line in problems_of(report) if _subject(line) not in known]
            if not problems:
                return
            if time.monotonic() > deadline:
                if wrong := [line for line in problems if not _UNDER_WAY.search(line)]:
                    text = "; ".join(wrong)
                    raise HostError(f"not healthy within {self._timeout_s:g} s (--timeout): {text}")
                for line in set(problems) - said:
                    self._say(f"waiting: {line}")
                said.update(problems)
            time.sleep(CHECK_EVERY_S)

    def _deploy_all(self) -> bool:
        if self._file.deploy is None:
            return False
        code, output, error = self._deploy()
        lines = [line for line in output.splitlines() if line]
        is_new = not lines or not lines[-1].startswith("no change")
        for line in lines if is_new else ():
            self._say(f"{self._leads}: {line}")
        if code:
            raise self._failure(output, error)
        return is_new

    def _deploy(self, *flags: str) -> tuple[int, str, str]:
        """Run ``greenroom deploy`` where the cluster leads, in a copy of the application's folder.

        What it needs is installed there, and the host needs no way back to this machine.
        """
        path, below = self._file.deploy, self._file.app_dir
        assert path is not None
        code, output, error = self._on(
            self._leads,
            "command",
            {
                name: file
                for name, file in files_in(f"app_dir={str(below)!r}", below.resolve())
                if self._file.wheels.folder.resolve() not in file.parents
            },
            args=["deploy", *flags, str(path.relative_to(below))],
            environ=variables_in(path.read_text(encoding="utf-8")),
        )
        return code, output, error

    def _failure(self, output: str, error: str) -> HostError:
        """Return what a command says that failed where the cluster leads."""
        return HostError(f"host {self._leads!r}: {error.strip() or output.strip()}")

    def _greenroom(self, *args: str) -> None:
        code, output, error = self._on(self._leads, "command", {}, args=args, environ={})
        if code:
            raise self._failure(output, error)

    # --- Hosts ------------------------------------------------------------------------------------

    def _on(
        self,
        name: str,
        operation: str,
        files: Mapping[str, Path | bytes] | None = None,
        **arguments: Any,
    ) -> Any:
        return self._ssh.run(self._targets[name], operation, files, **arguments)

    def _on_each(self, names: Iterable[str], does: Callable[[str], Any]) -> dict[str, Any]:
        """Do something on hosts at once; one GreenroomError for all that fail."""
        names, found, failed = list(names), {}, []
        if not names:
            return {}
        with ThreadPoolExecutor(len(names)) as executor:
            futures = {name: executor.submit(does, name) for name in names}
        for name, future in futures.items():
            try:
                found[name] = future.result()
            except GreenroomError as error:
                failed.append(str(error))
        if failed:
            raise GreenroomError("\n".join(failed))
        return found


def _subject(problem: str) -> str:
    """Return what a line of problems_of is about; the rest of it changes as time passes."""
    return re.split(r" is |: ", problem)[0]
