"""The bytes and lines of possibly compressed files, with every failure named by file and line."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

import zstandard

from envs.workloads.errors import TraceError

BLOCK_BYTES = 1 << 20
"""Unpacked bytes that are handed on at a time."""

LONGEST_LINE = 64 << 20
"""A file with a longer line is no text."""

_PACKED_BYTES = 1 << 15
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
_BOM = b"\xef\xbb\xbf"


class _Counting:
    """A binary file that counts what was read of it: a progress bar needs the packed bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.count = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.count += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def seekable(self) -> bool:
        return self._file.seekable()

    def close(self) -> None:
        self._file.close()


class Source:
    """A file as it reads unpacked: plain, gzip, zstd, bzip2 or xz, told by its first bytes and not by its name.

    Use it as a context manager, or close it.

    Args:
        path: The file.

    Attributes:
        path: The file.
        compression: ``gzip``, ``zstd``, ``bzip2``, ``xz``, or ``""``.
        total_bytes: Bytes of the file as it lies on the disk.
        line: Lines handed on so far.

    Raises:
        TraceError: If it is no file or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 0
        if path.is_dir():
            raise TraceError(path, "a file, but it is a directory: name one of the files in it")
        try:
            file = path.open("rb")
            self.total_bytes = os.fstat(file.fileno()).st_size
            magic = file.peek(6)[:6]
        except OSError as error:
            raise TraceError(path, f"a readable file ({error.strerror or error})") from error
        self._raw = _Counting(file)
        self.compression = next((name for start, name in _MAGIC.items() if magic.startswith(start)), "")
        self._pieces = self._unpack()
        self._head: bytes | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of the file as it lies on the disk that were read so far."""
        return min(self._raw.count, self.total_bytes) if self.total_bytes else self._raw.count

    def close(self) -> None:
        """Close the file; harmless when closed already."""
        self._pieces.close()  # type: ignore[attr-defined]
        self._raw.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def head(self) -> bytes:
        """Return the first unpacked bytes (up to about a MiB); they are read again later.

        Raises:
            TraceError: If not even they can be unpacked.
        """
        if self._head is None:
            parts: list[bytes] = []
            try:
                while sum(map(len, parts)) < BLOCK_BYTES and (piece := next(self._pieces, b"")):
                    parts.append(piece)
            except TraceError as error:
                if not parts:
                    raise
                self._pieces = _raising(error)
            self._head = b"".join(parts)
        return self._head

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of whole lines, each with the number of its first line.

        The last line may lack its end. A byte order mark is left out.

        Raises:
            TraceError: If the file is damaged or cut short (after all its whole lines), or is no text.
        """
        rest = b""
        for data in self._gathered():
            if self.line == 0 and not rest:
                data = data.removeprefix(_BOM)
            end = data.rfind(b"\n") + 1
            if not end:
                rest += data
                if len(rest) > LONGEST_LINE:
                    raise TraceError(self.path, f"lines of at most {LONGEST_LINE >> 20} MiB", line=self.line + 1)
                continue
            block, rest = rest + data[:end], data[end:]
            yield self._lines_of(block)
        if rest:
            yield self._lines_of(rest)

    def _lines_of(self, block: bytes) -> tuple[int, bytes]:
        first = self.line + 1
        self.line += block.count(b"\n") + (not block.endswith(b"\n"))
        return first, block

    def records(self, width: int) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of whole records of ``width`` bytes, each with the number of its first record, from 1.

        Raises:
            TraceError: If the file is damaged or ends within a record.
        """
        rest, number = b"", 1
        try:
            for data in self._gathered():
                data = rest + data
                whole = len(data) // width
                rest = data[whole * width :]
                if whole:
                    yield number, data[: whole * width]
                    number += whole
        except TraceError as error:
            raise TraceError(self.path, error.expected, line=number, unit="record") from error
        if rest:
            raise TraceError(
                self.path,
                f"whole records of {width} bytes, but the last has {len(rest)}: the file is cut short or of another format",
                line=number,
                unit="record",
            )

    def _gathered(self) -> Iterator[bytes]:
        """Yield what is unpacked in pieces of about a MiB; what came before a damage is yielded before it is raised."""
        parts, length = [], 0
        if self._head:
            parts, length = [self._head], len(self._head)
            self._head = None
        try:
            for piece in self._pieces:
                parts.append(piece)
                length += len(piece)
                if length >= BLOCK_BYTES:
                    yield b"".join(parts)
                    parts, length = [], 0
        except TraceError as error:
            if parts:
                yield b"".join(parts)
            raise TraceError(self.path, error.expected, line=self.line + 1) from error
        if parts:
            yield b"".join(parts)

    def _cut_short(self) -> str:
        return f"a complete {self.compression} file, but it ends early: copy or download it again"

    def _unpack(self) -> Iterator[bytes]:
        try:
            if self.compression == "zstd":
                yield from self._zstd()
                return
            read = self._raw.read if self.compression == "" else self._unpacker().read1
            while data := read(BLOCK_BYTES):
                yield data
        except EOFError as error:
            raise TraceError(self.path, self._cut_short()) from error
        except (OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            kind = f"undamaged {self.compression} data" if self.compression else "a readable file"
            raise TraceError(self.path, f"{kind} ({error}): copy or download it again") from error

    def _unpacker(self) -> gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile:
        if self.compression == "gzip":
            return gzip.GzipFile(fileobj=self._raw)
        raw = cast(BinaryIO, self._raw)  # of a file they need no more than read, seek and seekable
        return bz2.BZ2File(raw) if self.compression == "bzip2" else lzma.LZMAFile(raw)

    def _zstd(self) -> Iterator[bytes]:
        # stream_reader() takes a frame that is cut short for its end; the object says whether it saw the end.
        unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)
        frame, begun = unpacker.decompressobj(), False
        while data := self._raw.read(_PACKED_BYTES):
            while data:
                begun = True
                piece = frame.decompress(data)
                data = b""
                if piece:
                    yield piece
                if frame.eof:
                    data = frame.unused_data
                    frame, begun = unpacker.decompressobj(), False
        if begun:
            raise EOFError


def _raising(error: TraceError) -> Iterator[bytes]:
    """Yield nothing: the damage that was met while looking at the head is raised when it is its turn."""
    yield from ()
    raise error


def split_lines(block: bytes) -> list[bytes]:
    """Return the lines of a block, their ends included; only a line feed ends a line."""
    lines = block.split(b"\n")
    last = lines.pop()
    lines = [line + b"\n" for line in lines]
    return [*lines, last] if last else lines
