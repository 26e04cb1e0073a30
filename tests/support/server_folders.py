"""A folder on a server of objects, for tests that look at a run by the methods of `Path`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

from tests.servers.server import Server


class ServerFolder(str):
    """The URL of a folder or an object, with the methods of `Path` that tests of the near tier call."""

    server: Server

    @classmethod
    def at(cls, server: Server, url: str) -> Self:
        """Return a URL of a server."""
        folder = cls(url)
        folder.server = server
        return folder

    def __truediv__(self, name: str) -> Self:
        return self.at(self.server, f"{self}/{name}")

    @property
    def name(self) -> str:
        return self.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> Self:
        return self.at(self.server, self.rpartition("/")[0])

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yield the objects whose keys match; only a pattern that begins with `**/` matches at every depth."""
        end = pattern.removeprefix("**/")
        for key in self.server.keys(str(self)):
            path = PurePosixPath(key)
            if path.match(end) and (end != pattern or len(path.parts) == len(PurePosixPath(end).parts)):
                yield self / key

    def exists(self) -> bool:
        return self.name in self.server.keys(self.parent)

    def stat(self) -> ServerStat:
        return ServerStat(len(self.read_bytes()))

    def read_bytes(self) -> bytes:
        return self.server.read(self)

    def write_bytes(self, data: bytes) -> None:
        self.server.write(self, data)

    def mkdir(self, *, exist_ok: bool = False) -> None:
        """Do nothing: a server of objects has no folders."""

    def rename(self, target: Self) -> Self:
        target.write_bytes(self.read_bytes())
        self.unlink()
        return target

    def unlink(self) -> None:
        self.server.remove(self)


@dataclass(frozen=True)
class ServerStat:
    """What the tests ask about an object."""

    st_size: int


def remove_tree(folder: Path | ServerFolder) -> None:
    """Remove a folder with everything in it."""
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:
        for key in folder.server.keys(folder):
            (folder / key).unlink()


def steps_in(place: Path | ServerFolder) -> list[int]:
    """Return the steps with a manifest in a root or a near tier, ascending."""
    return sorted(int(path.parent.name[5:]) for path in place.glob("step-*/manifest.json"))
