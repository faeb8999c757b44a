"""Folders for the files of a run: local ones, and those behind a URL."""

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from filelock import FileLock

from captum_norm.text.files import write_whole
from captum_norm.text.urls import Remote, is_url

LOCK = "lock"


Item = TypeVar("Item")
Result = TypeVar("Result")


class Folder(Protocol):
    """A folder of small files, each written atomically; all methods may raise OSError.

    Attributes:
        threads: how many files are best read at a time.
        locks: whether it can be locked.
    """

    threads: int
    locks: bool

    def exists(self) -> bool:
        """Whether it exists.

        Raises:
            NotADirectoryError: it is something else.
        """

    def make(self) -> None:
        """Create it, if it does not exist."""

    def entries(self) -> Iterator[tuple[str, bool]]:
        """The names of its entries, one at a time, since there may be millions, and whether they are regular files."""

    def open(self, name: str) -> BinaryIO | None:
        """Open a file for reading; None if there is none."""

    def write(self, name: str, content: bytes) -> None:
        """Write a file."""

    def move(self, name: str, new: str) -> None:
        """Rename a file.

        Raises:
            FileNotFoundError: there is none.
        """

    def remove(self, *names: str) -> None:
        """Remove files, those that exist."""

    def remove_folder(self) -> None:
        """Remove the folder, if it is empty."""

    def locked(self) -> AbstractContextManager[object]:
        """Keep other runs out inside the context, if it can be locked.

        Raises:
            filelock.Timeout: another run holds the lock.
        """


class LocalFolder:
    """A folder of this machine, or of a shared file system. Links are not followed."""

    threads = 1
    locks = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        try:
            kind = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(kind):
            raise NotADirectoryError
        return True

    def make(self) -> None:
        self.path.mkdir(exist_ok=True)

    def entries(self) -> Iterator[tuple[str, bool]]:
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                yield entry.name, entry.is_file(follow_symlinks=False) or not os.path.lexists(entry)

    def open(self, name: str) -> BinaryIO | None:
        path = self.path / name
        try:
            # Without following a link or waiting for a pipe.
            opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(opened, "rb")

    def write(self, name: str, content: bytes) -> None:
        write_whole(self.path / name, content)

    def move(self, name: str, new: str) -> None:
        (self.path / name).replace(self.path / new)

    def remove(self, *names: str) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def remove_folder(self) -> None:
        try:
            self.path.rmdir()
        except OSError as error:  # it has files of another run or the user
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    @contextmanager
    def locked(self) -> Iterator[None]:
        with FileLock(self.path / LOCK).acquire(timeout=0):
            yield


class RemoteFolder:
    """A folder by its URL. There are no locks: runs of the same job write the same files."""

    threads = 16
    locks = False

    def __init__(self, url: str) -> None:
        self.remote = Remote(url)

    def __str__(self) -> str:
        return str(self.remote)

    def exists(self) -> bool:
        kind = self.remote.kind()
        if kind not in (None, "directory"):
            raise NotADirectoryError
        return kind is not None

    def make(self) -> None:
        self.remote.make()

    def entries(self) -> Iterator[tuple[str, bool]]:
        return self.remote.entries()

    def open(self, name: str) -> BinaryIO | None:
        with suppress(FileNotFoundError):
            return BytesIO((self.remote / name).read())
        return None

    def write(self, name: str, content: bytes) -> None:
        (self.remote / name).write(content)

    def move(self, name: str, new: str) -> None:
        content = (self.remote / name).read()
        (self.remote / new).write(content)
        (self.remote / name).remove()

    def remove(self, *names: str) -> None:
        self.remote.remove_files(names)

    def remove_folder(self) -> None:
        self.remote.remove_folder()

    def locked(self) -> AbstractContextManager[object]:
        return nullcontext()


def read_ahead(folder: Folder, read: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Apply a function that reads a file of the folder to each item; yield the results in order.

    In object stores, where every file takes its time, several are read at a time.
    """
    if folder.threads == 1:
        yield from map(read, items)
        return
    with ThreadPoolExecutor(folder.threads) as pool:
        reading = deque[Future[Result]]()
        for item in items:
            reading.append(pool.submit(read, item))
            if len(reading) == folder.threads:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()


def folder_of(name: str) -> Folder:
    """The folder at a path or URL."""
    return RemoteFolder(name) if is_url(name) else LocalFolder(Path(name))
