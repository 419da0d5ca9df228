"""Where a replica's code finds its packages and folders: made on this host, then entered."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from greenroom.actors.environments import packages
from greenroom.actors.environments.folders import Arrival
from greenroom.actors.messages.control import FolderFetched
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.config import RuntimeEnv, without_credentials


class Environment:
    """The runtime environment of one replica; ``ask`` asks the controller for a folder."""

    def __init__(self, settings: HostSettings, env: RuntimeEnv, ask: Callable[[str], None]) -> None:
        self._packages_at, self._folders_at = settings.environments_dir, settings.folders_dir
        self._env = env
        self._arrivals = {
            digest: Arrival(self._folders_at, digest, partial(ask, digest))
            for digest in env.folders
        }
        self.trouble = ""  # that status is to show
        self.name = ""  # of the virtual environment
        here = Path(sys.prefix)
        self._is_entered = here.parent == self._packages_at
        if self._is_entered:
            self.name = here.name
        elif env.requirements is not None:
            self.name = packages.name_of(*env.requirements)

    async def enter_packages(self) -> str | None:
        """Return the interpreter to go on in once the required packages are there; None for this.

        DeployFailedError where they cannot be installed.
        """
        os.environ.update(self._env.env_vars)
        if self._env.requirements is None or self._is_entered:
            return None
        installer, lines = self._env.requirements
        folder = self._packages_at / self.name
        self.trouble = without_credentials(f"{installer} installs {', '.join(lines)}")
        try:
            await packages.prepare(folder, installer, lines)
        finally:
            self.trouble = ""
        packages.enter(folder)
        return packages.python_of(folder)

    async def enter_folders(self) -> None:
        """Let the code find its folders when they are here; DeployFailedError."""
        if not self._arrivals:
            return
        await asyncio.gather(*(arrival.end() for arrival in self._arrivals.values()))
        sys.path[:0] = [str(self._folders_at / digest) for digest in self._env.folders]
        if self._env.working_dir is not None:
            os.chdir(self._folders_at / self._env.folders[0])

    def fetched(self, message: FolderFetched) -> None:
        """See :meth:`Arrival.arrived`."""
        if (arrival := self._arrivals.get(message.digest)) is not None:
            content = None if message.content is None else message.content.view
            arrival.arrived(content, message.error)
