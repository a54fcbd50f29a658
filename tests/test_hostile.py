"""Thousands of damaged shards and indexes: a chunk reads right, or is refused with an error of the library's own.

Never anything else: no other voxels, no silent absence, no foreign exception, crash, hang or huge allocation. The damage
is done in child processes, since a crash is one of the things looked for: `python test_hostile.py SEED CASES SUBJECT…`.

Some damage can't be noticed by any reader, and just that is let pass:

* to the values of a record's `labels` column, and in raw dialects to blocks: nothing repeats them, and no checksum covers
  them (zstd frames have one);
* to a record's coordinates where there is no index;
* to a chunk's coordinates in an index with offsets, if all else in it still fits the shard: absence is answered from the
  index alone, and only reading all records could tell. Indexes without offsets are checked against all records;
* to a shard with chunks of other cubes, if it was the only one with such: a warning tells then that absence is in doubt.
"""

from __future__ import annotations

import faulthandler
import json
import random
import re
import resource
import struct
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from conftest import SHARED_DATA, expected_sha256, volume_sha256
from exports import (
    BLOCK_BUFFER,
    COORDINATE_BUFFERS,
    END_MARK,
    LABELS_BUFFER,
    XYZ,
    Dialect,
    Voxels,
    make_chunks,
    message_buffers,
    open_export,
    read_voxels,
    volume_info,
    write_shard,
)
from naive import naive_decode

from zarr_dvid.errors import ZarrDvidError
from zarr_dvid.scale import shard_cache
from zarr_dvid.voxels import VALUES, Values

ARROW = "s0/0_0_0.arrow"
Buffers = Sequence[tuple[Sequence[XYZ], Sequence[tuple[int, int]]]]
MAX_EXTRA_BYTES = 256 << 20  # of memory; the largest subject has 2 MB and its voxels 50
SECONDS_A_CASE = 20


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An undamaged export.

    Attributes:
        files: By path.
        voxels: What its chunks read as.
        buffers: By shard, of each message: the rows' chunks, and start and length in the file of each buffer.
        is_raw: Whether its blocks are bare.
        info: The volume description, which tells voxels from chunks, or None.
    """

    files: Mapping[str, bytes]
    voxels: Mapping[XYZ, Mapping[Any, Voxels]]
    buffers: Mapping[str, Buffers]
    is_raw: bool = False
    info: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What was done to one file: `touched` is the range of the undamaged bytes that it concerns."""

    what: str
    path: str
    data: bytes
    touched: range


def walk_buffers(data: bytes, chunks: Sequence[XYZ]) -> Buffers:
    """Buffers of all messages of a stream whose rows are `chunks`."""
    with pa.ipc.open_stream(data) as stream:
        counts = [len(batch) for batch in stream]
    at = 8 + struct.unpack_from("<i", data, 4)[0]
    found = []
    first = 0
    for count in counts:
        at, buffers, _ = message_buffers(data, at)
        found.append((chunks[first : first + count], buffers))
        first += count
    return found


# ---- subjects


ONE_SHARD = {"0_0_0": ((0, 0, 0), (1, 2, 3), (3, 1, 0))}
ONE_SHARD_OF_5 = {"0_0_0": (*ONE_SHARD["0_0_0"], (2, 2, 2), (0, 0, 3))}
TWO_SHARDS = {**ONE_SHARD, "256_0_0": ((4, 0, 0), (5, 1, 3))}
SCATTERED = {**ONE_SHARD, "256_0_0": ((4, 0, 0), (1, 1, 1), (9, 9, 9))}


def synthetic(shards: Mapping[str, Sequence[XYZ]] = ONE_SHARD, **dialect: Any) -> Subject:
    """Shards of a dialect, by name."""
    files: dict[str, bytes] = {}
    buffers = {}
    for name, some in shards.items():
        shard = write_shard(make_chunks(*some), Dialect(**dialect))
        files |= shard.files(f"s0/{name}")
        buffers[f"s0/{name}.arrow"] = walk_buffers(shard.arrow, some)
    return Subject(
        files=files,
        voxels={chunk.xyz: chunk.voxels for some in shards.values() for chunk in make_chunks(*some)},
        buffers=buffers,
        is_raw=dialect.get("raw_blocks", False),
        info=volume_info((640, 640, 640)),
    )


def real(folder: str, shard: str, *, n_batches: int | None = None, max_voxels: int = 6) -> Subject:
    """A shard of DVID's, or its first batches."""
    path = SHARED_DATA / "exports" / folder / shard
    arrow = path.with_suffix(".arrow").read_bytes()
    with pa.ipc.open_stream(arrow) as stream:
        table = stream.read_all()
        has_blocks_of_zstd = "uncompressed_size" in stream.schema.names
    chunks = list(zip(*(table[f"chunk_{axis}"].to_pylist() for axis in "xyz"), strict=True))
    buffers = walk_buffers(arrow, chunks)
    csv = path.with_suffix(".csv")
    files = {ARROW: arrow}
    if n_batches is not None:
        buffers = buffers[:n_batches]
        n_rows = sum(len(rows) for rows, _ in buffers)
        at = 8 + struct.unpack_from("<i", arrow, 4)[0]
        for _ in range(n_batches):
            at, _, _ = message_buffers(arrow, at)
        files = {ARROW: arrow[:at] + END_MARK}
        chunks = chunks[:n_rows]
        lines = csv.read_bytes().splitlines(keepends=True)
        files["s0/0_0_0.csv"] = b"".join(lines[: 2 + n_rows])
    elif csv.exists():
        files["s0/0_0_0.csv"] = csv.read_bytes()
    else:
        files["s0/0_0_0.json"] = path.with_suffix(".json").read_bytes()
    # The scale is named s0 and the shard 0_0_0 here whatever they were: the cube of a single shard is unbounded.
    scale = shard.split("/")[0]
    expected = expected_sha256(path.parents[1], scale) if (path.parents[1] / "expected.json").exists() else dict[Any, Any]()
    voxels: dict[XYZ, Mapping[Any, Voxels]] = {}
    for row, xyz in enumerate(chunks):
        if len(voxels) == max_voxels or chunks.count(xyz) > 1:
            continue
        block = table["dvid_compressed_block"][row].as_py()
        if has_blocks_of_zstd:
            block = zstandard.ZstdDecompressor().decompress(block, max_output_size=1 << 22)
        try:
            supervoxels = naive_decode(block)
        except ValueError:
            continue
        if supervoxels.shape != (64, 64, 64):
            continue
        own, labels = (table[name][row].as_py() for name in ("supervoxels", "labels"))
        mapping = dict(zip(own, labels, strict=True))
        ids, inverse = np.unique(supervoxels, return_inverse=True)
        agglomerated = np.array([mapping[i] for i in ids.tolist()], np.uint64)[inverse].reshape(64, 64, 64)
        voxels[xyz] = {"labels": agglomerated, "supervoxels": supervoxels}
        if expected:
            hashes = expected[xyz][0] if isinstance(expected[xyz], list) else expected[xyz]
            for name in VALUES:
                assert volume_sha256(voxels[xyz][name]) == hashes[name], (xyz, name)
    return Subject(files=files, voxels=voxels, buffers={ARROW: buffers}, is_raw=not has_blocks_of_zstd)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "offset": synthetic,
    "offset, 3 rows a batch": lambda: synthetic(ONE_SHARD_OF_5, rows_a_batch=3),
    "offset, lz4": lambda: synthetic(body_compression="lz4"),
    "batch_offset": lambda: synthetic(ONE_SHARD_OF_5, rows_a_batch=3, index="batch_offset"),
    "rec": lambda: synthetic(index="rec"),
    "rec, 3 rows a batch": lambda: synthetic(ONE_SHARD_OF_5, rows_a_batch=3, index="rec"),
    "json, raw": lambda: synthetic(index="json", raw_blocks=True, has_size=False),
    "footer": lambda: synthetic(index="footer"),
    "rec, voxels": lambda: synthetic(index="rec", units="voxels"),
    "rec,offset,size": lambda: synthetic(index="rec,offset,size"),
    "no index": lambda: synthetic(index="none"),
    "two shards": lambda: synthetic(TWO_SHARDS),
    "two shards, rec": lambda: synthetic(TWO_SHARDS, index="rec"),
    "scattered": lambda: synthetic(SCATTERED),
    "scattered, json, voxels": lambda: synthetic(SCATTERED, index="json", units="voxels"),
    "two-scales s0": lambda: real("two-scales", "s0/0_0_0"),
    "two-scales s1": lambda: real("two-scales", "s1/0_0_0"),
    "odd-blocks": lambda: real("odd-blocks", "s0/0_0_0"),
    "batch-100-rows": lambda: real("batch-100-rows", "s1/30720_24576_28672", n_batches=1),
    "body-compressed": lambda: real("json-zstd-body-compressed", "s0/0_256_0"),
}

REAL = ("two-scales s0", "two-scales s1", "odd-blocks", "batch-100-rows", "body-compressed")


# ---- damage

NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    8,
    63,
    64,
    65,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


def random_edit(rng: random.Random, data: bytes, at: int) -> tuple[str, bytes, range]:
    """Flips, overwrites, inserts, deletes, duplicates or cuts bytes at a place."""
    kind = rng.choice(["bit", "bit", "byte", "byte", "int", "int", "insert", "delete", "duplicate", "swap", "zeros", "cut"])
    n = rng.choice([1, 1, 2, 4, 8, 16, 100])
    end = min(len(data), at + n)
    some = data[at:end]
    if kind == "bit":
        return kind, data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :], range(at, at + 1)
    if kind == "byte":
        return kind, data[:at] + rng.randbytes(len(some)) + data[end:], range(at, end)
    if kind == "int":
        width = rng.choice([2, 4, 8])
        at -= at % width
        old = int.from_bytes(data[at : at + width], "little")
        new = rng.choice([rng.choice(NUMBERS), old + rng.choice([-64, -8, -1, 1, 8, 64]), -1, old << 1, old >> 1])
        return kind, data[:at] + (new % 256**width).to_bytes(width, "little") + data[at + width :], range(at, at + width)
    if kind == "insert":
        return kind, data[:at] + rng.choice([rng.randbytes(n), bytes(n), b"\xff" * n]) + data[at:], range(at, len(data))
    if kind == "delete":
        return kind, data[:at] + data[end:], range(at, len(data))
    if kind == "duplicate":
        return kind, data[:end] + some + data[end:], range(at, len(data))
    if kind == "swap":
        other = rng.randrange(len(data) - len(some) + 1)
        low, high = sorted([at, other])
        if high < low + len(some):
            return "same", data, range(0)
        one, two = data[low : low + len(some)], data[high : high + len(some)]
        swapped = data[:low] + two + data[low + len(some) : high] + one + data[high + len(some) :]
        return kind, swapped, range(low, high + len(some))
    if kind == "zeros":
        return kind, data[:at] + bytes(len(some)) + data[end:], range(at, end)
    return kind, data[:at], range(at, len(data))


def edit_text(rng: random.Random, data: bytes) -> tuple[str, bytes, range]:
    """Damages an index as text: numbers, lines, names."""
    everything = range(len(data))
    kind = rng.choice(
        ["number", "number", "number", "drop line", "repeat line", "swap lines", "cut at line", "bytes", "bytes", "bytes"]
    )
    if kind == "bytes":
        return random_edit(rng, data, rng.randrange(len(data)))
    if kind == "number":
        found = rng.choice(list(re.finditer(rb"\d+", data)))
        old = int(found[0])
        new = rng.choice([rng.choice(NUMBERS), old + 1, old - 1, old + 8, old * 64, -old, rng.randrange(10)])
        text = rng.choice([str(new), str(new), str(new), f"{new}.0", f" {new}", f"{new}e1", "", "nan", hex(new)])
        return kind, data[: found.start()] + text.encode() + data[found.end() :], everything
    lines = data.splitlines(keepends=True)
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    if kind == "drop line":
        del lines[i]
    elif kind == "repeat line":
        lines.insert(j, lines[i])
    elif kind == "swap lines":
        lines[i], lines[j] = lines[j], lines[i]
    else:
        del lines[i:]
    return kind, b"".join(lines), everything


def damage(rng: random.Random, subject: Subject) -> Damage:
    path = rng.choice(list(subject.buffers)) if rng.random() < 0.6 else rng.choice(list(subject.files))
    data = subject.files[path]
    if path not in subject.buffers:
        what, new, touched = edit_text(rng, data)
        return Damage(what=what, path=path, data=new, touched=touched)
    structure = [
        0,
        *(rng.randrange(span.start, span.stop) for span in metadata_spans(data)),
        len(data) - rng.randrange(1, 65),
    ]
    at = rng.choice(structure) if rng.random() < 0.6 else rng.randrange(len(data))
    what, new, touched = random_edit(rng, data, at)
    return Damage(what=f"{what} at {touched.start}", path=path, data=new, touched=touched)


def metadata_spans(data: bytes) -> list[range]:
    """Prefix and metadata of each message of an undamaged stream."""
    at = 8 + struct.unpack_from("<i", data, 4)[0]
    spans = [range(at)]
    while data[at : at + 4] == END_MARK[:4] and data[at : at + 8] != END_MARK:
        at, _, span = message_buffers(data, at)
        spans.append(span)
    return spans


# ---- judgement


def blind_spans(subject: Subject, path: str, xyz: XYZ, values: str) -> list[tuple[int, int]]:
    """Start and length of what can be damaged in a shard so that no reader can notice."""
    spans = []
    has_index = len(subject.files) > len(subject.buffers) or subject.files[path].endswith(b"CHUNKIDX")
    for rows, buffers in subject.buffers[path]:
        if not has_index:
            spans += [buffers[i] for i in COORDINATE_BUFFERS]
        if xyz in rows:
            spans += [buffers[LABELS_BUFFER]] if values == "labels" else []
            spans += [buffers[BLOCK_BUFFER]] if subject.is_raw else []
    return spans


def is_noticeable(subject: Subject, done: Damage, xyz: XYZ, values: Values) -> bool:
    """Whether a chunk still reads wrong once everything is as it was in those spans."""
    whole = subject.files[done.path]
    if done.path not in subject.buffers or len(done.data) != len(whole):
        return True
    data = bytearray(done.data)
    for at, size in blind_spans(subject, done.path, xyz, values):
        data[at : at + size] = whole[at : at + size]
    if data == done.data:
        return True
    try:
        found = read_voxels(open_export({**subject.files, done.path: bytes(data)}, info=subject.info), xyz, values=values)
    except ZarrDvidError:
        return False
    return found is None or not np.array_equal(found, subject.voxels[xyz][values])


def may_be_absent(subject: Subject, done: Damage, xyz: XYZ) -> bool:
    """Whether the index names another chunk in the place of this one, with all offsets as they were."""
    if not done.path.endswith(".csv") or b"offset," not in done.data:
        return False
    names, *rows = [line.split(b",") for line in done.data.splitlines() if not line.startswith(b"#")]
    old_names, *old_rows = [line.split(b",") for line in subject.files[done.path].splitlines() if not line.startswith(b"#")]
    if names != old_names or len(rows) != len(old_rows) or any(len(row) != len(names) for row in rows):
        return False
    changed = [(old, new) for old, new in zip(old_rows, rows, strict=True) if old != new]
    own = [b"%d" % c for c in xyz]
    return all(old[3:] == new[3:] for old, new in changed) and any(old[:3] == own != new[:3] for old, new in changed)


def find_fault(subject: Subject, done: Damage, rng: random.Random) -> str | None:
    """What a damaged export does that it must not, if anything."""
    export = open_export({**subject.files, done.path: done.data}, info=subject.info)
    chunks = list(subject.voxels)
    hit = [
        xyz
        for rows, buffers in subject.buffers.get(done.path, ())
        for xyz in rows
        if xyz in subject.voxels and min(at for at, _ in buffers) - 600 <= done.touched.start
    ]
    asked: list[XYZ] = [*hit[-1:], *rng.sample(chunks, min(2, len(chunks))), (900, 1, 2)]
    doubts = False
    for xyz in dict.fromkeys(asked):
        for values in VALUES:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    found = read_voxels(export, xyz, values=values)
                except ZarrDvidError:
                    continue
                except Exception:
                    return f"{xyz} {values}: {traceback.format_exc()}"
            doubts |= any("taken to be absent" in str(warning.message) for warning in caught)
            if xyz not in subject.voxels:
                if found is not None:
                    return f"{xyz} {values}: a chunk that never was"
            elif found is None:
                if not doubts and not may_be_absent(subject, done, xyz) and is_noticeable(subject, done, xyz, values):
                    return f"{xyz} {values}: silently absent"
            elif not np.array_equal(found, subject.voxels[xyz][values]) and is_noticeable(subject, done, xyz, values):
                return f"{xyz} {values}: other voxels"
    return None


def check(name: str, seed: int, n_cases: int) -> list[str]:
    """Damages a subject so many times; gives what went wrong."""
    subject = SUBJECTS[name]()
    export = open_export(subject.files, info=subject.info)
    for xyz, voxels in subject.voxels.items():
        for values in VALUES:
            np.testing.assert_array_equal(read_voxels(export, xyz, values=values), voxels[values])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_EXTRA_BYTES, resource.RLIM_INFINITY))
    faults = []
    for case in range(n_cases):
        faulthandler.dump_traceback_later(SECONDS_A_CASE, exit=True)
        rng = random.Random(f"{name} {seed} {case}")
        done = damage(rng, subject)
        print(f"{name}, seed {seed}, case {case}: {done.what} in {done.path}", file=sys.stderr)
        fault = find_fault(subject, done, rng) if done.data != subject.files[done.path] else None
        if fault is not None:
            faults.append(f"{name}, seed {seed}, case {case}, {done.what} in {done.path}: {fault}")
        shard_cache.__init__(shard_cache.max_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return faults


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to bound the memory")
@pytest.mark.parametrize("names", [tuple(name for name in SUBJECTS if name not in REAL), REAL], ids=["synthetic", "real"])
def test_damage_is_refused_or_harmless(names: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    if names == REAL:
        request.getfixturevalue("shared_data")
    child = subprocess.run([sys.executable, __file__, "0", "250", *names], capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, f"the process died:\n{child.stderr[-4000:]}"
    faults = json.loads(child.stdout)
    assert not faults, f"{len(faults)} cases, the first ones:\n" + "\n".join(faults[:5])


if __name__ == "__main__":
    faulthandler.enable()
    print(json.dumps([fault for name in sys.argv[3:] for fault in check(name, int(sys.argv[1]), int(sys.argv[2]))]))
