"""Files that appear whole or not at all: written under temporary names in their folders, then renamed together.

with staged() as stage:
    stage.temporary(pathlib.Path("model.onnx")).write_bytes(data)
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
from collections.abc import Generator


@dataclasses.dataclass
class Stage:
    """The files being written, by the temporary name of each."""

    _finals: dict[pathlib.Path, pathlib.Path] = dataclasses.field(default_factory=dict[pathlib.Path, pathlib.Path])
    _folders: list[pathlib.Path] = dataclasses.field(default_factory=list[pathlib.Path])

    def temporary(self, final: pathlib.Path) -> pathlib.Path:
        """A name to write to now; it becomes `final` when the whole stage succeeds. Missing parent folders are made.

        Raises:
            OSError: `final` is a folder or a device, which no file may take the place of.
        """
        if final.exists() and not final.is_file():
            raise OSError(errno.EEXIST, "it is there and no regular file", str(final))
        for folder in reversed([parent for parent in final.parents if not parent.exists()]):
            folder.mkdir()
            self._folders.append(folder)
        temporary = final.with_name(f".{final.name}.{os.urandom(4).hex()}.part")
        self._finals[temporary] = final
        return temporary

    def commit(self) -> None:
        """Give each file its final name, in the order the names were asked for."""
        for temporary, final in self._finals.items():
            temporary.replace(final)

    def discard(self) -> None:
        """Remove files without a final name, and the folders made for it."""
        for temporary in self._finals:
            temporary.unlink(missing_ok=True)
        for folder in reversed(self._folders):
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def staged() -> Generator[Stage]:
    """A stage that is committed where the block ends well, and leaves no trace where it does not."""
    stage = Stage()
    try:
        yield stage
        stage.commit()
    except BaseException:
        stage.discard()
        raise
