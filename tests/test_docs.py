"""The documentation: its examples run, its messages are real ones, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import zstandard
from naive import naive_encode_libdvid

import zarr_dvid
from zarr_dvid import survey
from zarr_dvid.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))

_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a document.

    Attributes:
        language: Behind its fence.
        line: Of its fence.
        text: What is in it.
        output: The block of text right behind it, which is what it prints.
    """

    language: str
    line: int
    text: str
    output: str | None


def blocks_of(document: Path) -> list[Block]:
    """A document's fenced blocks in their order."""
    text = document.read_text()
    blocks = []
    for match in _FENCE.finditer(text):
        after = _FENCE.match(text, match.end() + 1)
        output = textwrap.dedent(after[3]) if after and after[2] == "text" else None
        blocks.append(Block(match[2], text.count("\n", 0, match.start()) + 1, textwrap.dedent(match[3]), output))
    return blocks


def named(path: Path) -> str:
    return path.name


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which `zarr-dvid demo demo` was run, as docs/reading.md says."""
    directory = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert main(["demo", "demo"]) == 0
    return directory


@pytest.fixture
def workplace(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a demo export of its own."""
    shutil.copytree(demo, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_python_examples_run_and_print_what_the_document_says(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "import icechunk" in document.read_text():
        pytest.importorskip("icechunk")
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in blocks_of(document):
        if block.language == "python":
            code = compile("\n" * block.line + block.text, str(document), "exec")  # so that tracebacks name its lines
            with warnings.catch_warnings():
                exec(code, namespace)
            printed = capsys.readouterr().out
            assert block.output in (None, printed), f"{document.name}, line {block.line}"


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_commands_run(document: Path) -> None:
    lines = [line for block in blocks_of(document) if block.language == "console" for line in block.text.splitlines()]
    for command in (line.removeprefix("$ ") for line in lines if line.startswith("$ zarr-dvid ")):
        assert main(shlex.split(command)[1:]) == 0, command


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=named)
def test_notebook_runs_from_top_to_bottom(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)  # a picture of them would be stale one day
    nbclient.NotebookClient(content, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()


@pytest.mark.parametrize("document", [*DOCUMENTS, *NOTEBOOKS], ids=named)
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    for link in _LINK.findall(document.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings], link


def test_architecture_names_every_module() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    modules = [*ROOT.glob("zarr_dvid/*.py"), *ROOT.glob("zarr_dvid/_native/*.[ch]pp")]
    assert [path.name for path in modules if path.name[0] != "_" and f"`{path.name}`" not in text] == []


def test_reliability_tells_the_present_limits() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    assert f"have at most {survey._CHECK_ALL_BYTES >> 20} MiB together" in text
    assert f"a sample of {survey._SAMPLE_SHARDS} shards" in text


Rows = list[dict[str, Any]]
SHARD, INDEX = "s0/0_0_0.arrow", "s0/0_0_0.csv"
CHUNK_XYZ = (2, 0, 0)  # of the second record of this shard
CHUNK = np.s_[0:64, 0:64, 128:192]


def cut(name: str, size: int) -> Callable[[Path], None]:
    return edit(name, lambda data: data[:size])


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(export: Path) -> None:
        (export / name).write_bytes(change((export / name).read_bytes()))

    return apply


def remove(*names: str) -> Callable[[Path], None]:
    def apply(export: Path) -> None:
        for name in names:
            (export / name).unlink()

    return apply


def remove_scales(export: Path) -> None:
    for scale_path in export.glob("s?"):
        shutil.rmtree(scale_path)


def both(*steps: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(export: Path) -> None:
        for step in steps:
            step(export)

    return apply


def edit_lines(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    """Changes the rows of the index, below its comment and header."""

    def apply(text: bytes) -> bytes:
        lines = text.decode().splitlines(keepends=True)
        return "".join(lines[:2] + change(lines[2:])).encode()

    return edit(INDEX, apply)


def swap_chunks(lines: list[str]) -> list[str]:
    """The first two rows with each other's coordinates."""
    one, other = (line.split(",") for line in lines[:2])
    return [",".join(other[:3] + one[3:]), ",".join(one[:3] + other[3:]), *lines[2:]]


def by_record(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    """Turns the index into one of 2025, without offsets, and changes its rows."""

    def apply(text: bytes) -> bytes:
        rows = [",".join(line.split(",")[:3]) for line in text.decode().splitlines()[2:]]
        return "".join(["x,y,z,rec\n", *change([f"{row},{i}\n" for i, row in enumerate(rows)])]).encode()

    return edit(INDEX, apply)


def edit_records(change: Callable[[Rows], Rows | None]) -> Callable[[Path], None]:
    """Changes the records of the shard, and writes it anew with an index that fits."""

    def apply(export: Path) -> None:
        with pa.ipc.open_stream((export / SHARD).read_bytes()) as stream:
            schema, rows = stream.schema, stream.read_all().to_pylist()
        assert chunk_of(rows[1]) == CHUNK_XYZ
        changed = change(rows)
        rows = rows if changed is None else changed
        sink, lines, start = pa.BufferOutputStream(), ["# schema_size=0", "x,y,z,offset,size,batch_idx"], 0
        with pa.ipc.new_stream(sink, schema) as writer:
            for row in rows:
                writer.write_batch(pa.RecordBatch.from_pylist([row], schema))
                x, y, z = chunk_of(row)
                lines.append(f"{x},{y},{z},{start},{sink.tell() - start},0")
                start = sink.tell()
        (export / SHARD).write_bytes(sink.getvalue().to_pybytes())
        (export / INDEX).write_text("".join(f"{line}\n" for line in lines))

    return apply


def chunk_of(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row[f"chunk_{axis}"] for axis in "xyz")


def edit_frame(rows: Rows) -> None:
    frame = rows[1]["dvid_compressed_block"]
    rows[1]["dvid_compressed_block"] = frame[:-1] + bytes([frame[-1] ^ 1])


def replace_block(rows: Rows, block: bytes) -> None:
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(block)
    rows[1] |= {"dvid_compressed_block": frame, "uncompressed_size": len(block)}


def cut_block(rows: Rows) -> None:
    block = zstandard.ZstdDecompressor().decompress(rows[1]["dvid_compressed_block"])
    replace_block(rows, block[: 16 + 8 * len(rows[1]["supervoxels"])])


def other_size(rows: Rows) -> None:
    replace_block(rows, naive_encode_libdvid(np.full((32, 32, 32), 7, np.uint64)))
    rows[1] |= {"labels": [7], "supervoxels": [7]}


def set_column(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(rows: Rows) -> None:
        rows[1][name] = change(rows[1][name])

    return edit_records(apply)


def read(export: Path, **options: Any) -> npt.NDArray[np.uint64]:
    return np.asarray(zarr_dvid.open(export, **options)["s0/labels"][CHUNK])


BROKEN: dict[str, Callable[[Path], None]] = {
    "arrow missing": remove(SHARD),
    "lost": remove(SHARD, INDEX),
    "arrow empty": cut(SHARD, 0),
    "no arrow": edit(SHARD, lambda _: b"hello, world"),
    "exported twice": edit(SHARD, lambda data: data + data),
    "torn": both(by_record(list), cut(SHARD, 300_000)),
    "twice without index": both(remove(INDEX), edit(SHARD, lambda data: data + data)),
    "no index no end": both(remove(INDEX), edit(SHARD, lambda data: data[:-8])),
    "index empty": cut(INDEX, 0),
    "index cut": cut(INDEX, 200),
    "index lacks end": edit_lines(lambda lines: lines[:-1]),
    "index lacks line": edit_lines(lambda lines: lines[:5] + lines[6:]),
    "index twice": edit_lines(lambda lines: [*lines, lines[3]]),
    "index columns": edit(INDEX, lambda text: text.replace(b"offset", b"start")),
    "index swapped": edit_lines(swap_chunks),
    "rec swapped": by_record(swap_chunks),
    "rec lacks": by_record(lambda lines: lines[:-1]),
    "header": edit(SHARD, lambda data: data[:2948] + b"\xff" + data[2949:]),
    "frame": edit_records(edit_frame),
    "length": set_column("uncompressed_size", lambda size: size + 1),
    "table": set_column("supervoxels", lambda table: [*table[:-1], 99]),
    "labels": set_column("labels", lambda labels: labels[:-1]),
    "block": edit_records(cut_block),
    "size": edit_records(other_size),
    "ambiguous": edit_records(lambda rows: [*rows, rows[1] | {"labels": [99] * len(rows[1]["labels"])}]),
    "nothing": shutil.rmtree,
    "elsewhere": remove_scales,
    "info": edit("info", lambda text: text.replace(b"uint64", b"uint8", 1)),
    "name": lambda export: (export / "s0/100_0_0.arrow").touch(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_reliability_quotes_real_errors(name: str, workplace: Path) -> None:
    export = workplace / "demo/export"
    BROKEN[name](export)
    with pytest.raises(zarr_dvid.ZarrDvidError) as caught:
        read(export)
    assert_quoted(caught.value, workplace)


@pytest.mark.parametrize("name", ["vanished", "cut in use"])
def test_reliability_quotes_real_errors_of_shards_in_use(name: str, workplace: Path) -> None:
    export = workplace / "demo/export"
    labels = zarr_dvid.open(export)["s0/labels"]
    labels[CHUNK]
    {"vanished": remove(SHARD), "cut in use": cut(SHARD, 1000)}[name](export)
    with pytest.raises(zarr_dvid.ZarrDvidError) as caught:
        labels[CHUNK]
    assert_quoted(caught.value, workplace)


def test_reliability_quotes_the_error_of_an_info_that_does_not_fit(workplace: Path) -> None:
    with pytest.raises(zarr_dvid.ExportError) as caught:
        read(workplace / "demo/export", info={"scales": [{"size": [256, 256, 128]}]})
    assert_quoted(caught.value, workplace)


WARNED: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "warn no index": (remove(INDEX), {}),
    "warn empty": (edit_records(lambda _: []), {}),
    "warn stray": (remove("export.log"), {"info": {"scales": [{"size": [256, 128, 128]}] * 3}}),
    "warn log": (both(), {"info": {"scales": [{"size": [256, 256, 150]}, *[{"size": [128, 128, 64]}] * 2]}}),
    "warn doubt": (both(remove("info"), edit_records(lambda rows: rows[2:]), lambda e: (e / "s0/256_0_0.csv").touch()), {}),
}


@pytest.mark.parametrize("name", WARNED)
def test_reliability_quotes_real_warnings(name: str, workplace: Path) -> None:
    export = workplace / "demo/export"
    breaks, options = WARNED[name]
    breaks(export)
    with pytest.warns(zarr_dvid.ExportWarning) as caught:
        read(export, **options)
    text = (ROOT / "docs/reliability.md").read_text()
    assert f"| `{caught[0].message}` |" in text


def assert_quoted(error: zarr_dvid.ZarrDvidError, workplace: Path) -> None:
    message = str(error).replace(str(workplace), "/exports")
    assert f"`{type(error).__name__}`: `{message}` |" in (ROOT / "docs/reliability.md").read_text(), message
