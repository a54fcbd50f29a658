"""Index files as text: what is taken, and what is refused with a plain word instead of a foreign exception."""

from __future__ import annotations

import json

import numpy as np
import pytest
from exports import csv_index, make_chunks, open_export, write_shard
from hypothesis import example, given
from hypothesis import strategies as st

from zarr_dvid.errors import ShardIndexError
from zarr_dvid.sidecar import IndexRows, parse_csv, parse_json

REC = b"x,y,z,rec\n"
INT64_MAX = 2**63 - 1

coordinate = st.integers(-(2**63), INT64_MAX)
place = st.integers(0, 2**62 - 1)


def table(rows: IndexRows) -> dict[str, list[int]]:
    columns = {name: getattr(rows, name) for name in ("record", "offset_bytes", "size_bytes", "row")}
    return {"xyz": rows.xyz.tolist()} | {name: values.tolist() for name, values in columns.items() if values is not None}


# ---- CSV

HEADERS = (
    "x,y,z,rec",
    "x,y,z,rec,batch_offset,batch_idx",
    "x,y,z,offset,size,batch_idx",
    "x,y,z,offset,size",
    "x,y,z,rec,offset,size",
    "x,y,z,rec,offset,size,batch_idx",
    "size,z,offset,y,later,x",
)


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("comment", ["", "# schema_size=0\n", "# a\n#\n# schema_size=688\n"])
def test_every_dialect_by_its_header(header: str, comment: str) -> None:
    names = header.split(",")
    rows = [[1000 * i + column for column in range(len(names))] for i in range(3)]
    found = parse_csv(csv_index(header, rows, comment=comment), "p.csv")
    assert (found.path, found.dialect, len(found)) == ("p.csv", f"csv {header}", 3)
    expected = {"rec": "record", "offset": "offset_bytes", "size": "size_bytes", "batch_idx": "row"}
    values = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    assert table(found) == {"xyz": [list(xyz) for xyz in zip(values["x"], values["y"], values["z"], strict=True)]} | {
        expected[name]: values[name] for name in names if name in expected
    }


def test_a_header_may_have_more_names_than_rows_have_values() -> None:
    found = parse_csv(b"x,y,z,rec,morton\n1,2,3,0\n4,5,6,1\n", "p")
    assert table(found) == {"xyz": [[1, 2, 3], [4, 5, 6]], "record": [0, 1]}


@pytest.mark.parametrize("header", HEADERS)
def test_an_index_may_have_no_rows(header: str) -> None:
    found = parse_csv(f"{header}\n".encode(), "p")
    assert len(found) == 0
    assert found.xyz.shape == (0, 3)
    assert all(values == [] for values in table(found).values())


@given(st.lists(st.tuples(coordinate, coordinate, coordinate, place), max_size=20), st.sampled_from(["\n", "\r\n"]))
@example([(INT64_MAX, -(2**63), 0, 2**62 - 1)], "\n")
def test_any_rows_of_integers(rows: list[tuple[int, int, int, int]], line_end: str) -> None:
    data = csv_index("x,y,z,rec", rows).replace(b"\n", line_end.encode())
    assert table(parse_csv(data, "p")) == {"xyz": [list(row[:3]) for row in rows], "record": [row[3] for row in rows]}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(REC + b"1,2,3,0\n4,5,6", id="cut before a value"),
        pytest.param(REC + b"1,2,3,0\n4,5,6,1", id="cut before the line end"),
        pytest.param(REC + b"1,2,3,0\n4,5,\n", id="a value too few and an empty one"),
        pytest.param(REC + b"1,2,3,0\n4,5,6\n", id="a value too few"),
        pytest.param(REC + b"1,2,3\n4,5,6\n", id="no places"),
        pytest.param(REC + b"1,2,3,0\n4,5,6,1,7\n", id="a value too many"),
        pytest.param(REC + b"1,2,3,0,7\n", id="a value too many in all rows"),
        pytest.param(REC + b"1.0,2,3,0\n", id="float"),
        pytest.param(REC + b"1e3,2,3,0\n", id="exponent"),
        pytest.param(REC + b"nan,2,3,0\n", id="nan"),
        pytest.param(REC + b"NULL,2,3,0\n", id="null"),
        pytest.param(REC + b",2,3,0\n", id="empty value"),
        pytest.param(REC + b"+1,2,3,0\n", id="plus"),
        pytest.param(REC + b'"1",2,3,0\n', id="quotes"),
        pytest.param(REC + "\u0661,2,3,0\n".encode(), id="digits of another script"),
        pytest.param(REC + "\u22121,2,3,0\n".encode(), id="a minus of another script"),
        pytest.param(REC + b"\xff\xfe,2,3,0\n", id="no UTF-8"),
        pytest.param(REC + b"1,2,3,\x00\n", id="NUL"),
        pytest.param(REC + b"99999999999999999999,2,3,0\n", id="more than 64 bits"),
        pytest.param(REC + b"1,2,3,0\n\n4,5,6,1\n", id="empty line"),
        pytest.param(REC + b"1,2,3,0\n\n", id="empty last line"),
        pytest.param(REC + b"\n1,2,3,0\n", id="empty first line"),
        pytest.param(REC + b"1,2,3,0\n# end\n", id="comment behind rows"),
        pytest.param(REC + b"1,2,3,-1\n", id="negative record"),
        pytest.param(REC + b"1,2,3,4611686018427387904\n", id="huge record"),
        pytest.param(b"x,y,z,offset,size\n1,2,3,-8,8\n", id="negative offset"),
        pytest.param(b"x,y,z,offset,size\n1,2,3,8,-8\n", id="negative size"),
        pytest.param(b"x,y,z,offset,size,batch_idx\n1,2,3,8,8,-1\n", id="negative row"),
        pytest.param(b"x,y,z,offset,size,batch_idx\n1,2,3,8,8,2147483648\n", id="huge row"),
        pytest.param(b"x,y,z,offset,size,batch_idx\n1,2,3,8,8,4294967296\n", id="a row that is 0 in 32 bits"),
        pytest.param(b"x,y,z\n1,2,3\n", id="no place"),
        pytest.param(b"x,y,z,offset\n1,2,3,0\n", id="no size"),
        pytest.param(b"x,y,rec\n1,2,0\n", id="no z"),
        pytest.param(b"x,y,z,rec,x\n1,2,3,0,1\n", id="x twice"),
        pytest.param(b"x,y,z,rec,rec\n1,2,3,0,1\n", id="rec twice"),
        pytest.param(b"X,Y,Z,REC\n1,2,3,0\n", id="capitals"),
        pytest.param(b"x;y;z;rec\n1;2;3;0\n", id="semicolons"),
        pytest.param(b"x\ty\tz\trec\n1\t2\t3\t0\n", id="tabs"),
        pytest.param(b"1,2,3,0\n4,5,6,1\n", id="no header"),
        pytest.param(b"\xef\xbb\xbf" + REC + b"1,2,3,0\n", id="byte order mark"),
        pytest.param((REC + b"1,2,3,0\n").decode().encode("utf-16"), id="UTF-16"),
        pytest.param(b"x,y,z,rec\r1,2,3,0\r", id="carriage returns only"),
        pytest.param(b"# schema_size=0\n", id="a comment only"),
        pytest.param(b"# schema_size=0", id="a comment cut"),
        pytest.param(b"#", id="a sharp"),
        pytest.param(b"\n", id="a line end only"),
        pytest.param(b"x,y,z,re", id="header cut"),
        pytest.param(bytes(1000) + b"\n", id="zeros"),
        pytest.param(b"\xff" * 1000 + b"\n", id="ones"),
        pytest.param(b"," * 100_000 + b"\n", id="commas"),
        pytest.param(b'{"1_2_3": 0}\n', id="JSON"),
    ],
)
def test_what_is_no_index_is_refused(data: bytes) -> None:
    with pytest.raises(ShardIndexError) as caught:
        parse_csv(data, "s0/0_0_0.csv")
    error = caught.value
    assert error.path == "s0/0_0_0.csv"
    assert error.advice is not None
    message = str(error)
    assert message.startswith("s0/0_0_0.csv: the index ")
    assert "None" not in message
    assert message.isprintable(), repr(message)
    assert len(message) < 1000


def test_an_empty_index_tells_that_the_export_was_killed() -> None:
    with pytest.raises(ShardIndexError, match="index is empty.*0 bytes.*killed"):
        parse_csv(b"", "p")


@given(st.binary(max_size=60) | st.text(alphabet="xyzrecofst,0123456789-#\n\r.", max_size=60).map(str.encode))
def test_random_text_is_an_index_or_refused(data: bytes) -> None:
    for parse in (parse_csv, parse_json):
        for text in (data, data + b"\n", REC + data + b"\n", b'{"1_2_3":' + data + b"}"):
            try:
                rows = parse(text, "p")
            except ShardIndexError:
                continue
            assert rows.xyz.dtype == np.int64
            assert rows.record is not None or (rows.offset_bytes is not None and rows.size_bytes is not None)


@given(st.data())
def test_every_cut_of_an_index_is_seen_or_leaves_whole_rows(data: st.DataObject) -> None:
    text = csv_index("x,y,z,offset,size,batch_idx", [(9, 8, 7, 0, 1000, 0), (6, 5, 4, 1000, 100, 0)], comment="# a=0\n")
    cut = data.draw(st.integers(0, len(text) - 1))
    try:
        found = parse_csv(text[:cut], "p")
    except ShardIndexError:
        return
    assert text[:cut].endswith(b"\n")
    assert found.xyz.tolist() == [[9, 8, 7], [6, 5, 4]][: len(found)]


def test_an_index_larger_than_any_is_refused_before_it_is_read() -> None:
    shard = write_shard(make_chunks((0, 0, 0), (1, 2, 3)))
    for ending in (".csv", "-offsets.csv", ".json"):
        files = shard.files() | {f"s0/0_0_0{ending}": Huge()}
        with pytest.raises(ShardIndexError, match="larger than any index") as caught:
            open_export(files).read_chunk(0, (1, 2, 3))
        assert caught.value.path == f"s0/0_0_0{ending}"
        assert caught.value.found == Huge.SIZE


class Huge(bytes):
    """Bytes of 4 GiB, as a listing shows them, that must not be looked at."""

    SIZE = 2**32 - 2**20  # `len` must fit

    def __len__(self) -> int:
        return self.SIZE

    def __getitem__(self, key: object) -> bytes:
        raise AssertionError("the file was read")


# ---- JSON


@given(st.dictionaries(st.tuples(*[st.integers(-(10**10) + 1, 10**10 - 1)] * 3), place, max_size=20), st.booleans())
def test_any_json_index(entries: dict[tuple[int, ...], int], indented: bool) -> None:
    document = {"_".join(map(str, xyz)): record for xyz, record in entries.items()}
    found = parse_json(json.dumps(document, indent=2 if indented else None).encode(), "p.json", dialect="json footer")
    assert (found.path, found.dialect) == ("p.json", "json footer")
    assert table(found) == {"xyz": [list(xyz) for xyz in entries], "record": list(entries.values())}


def test_a_repeated_key_is_kept_twice() -> None:
    """So that the check against the records sees it; json.loads alone would keep the last."""
    found = parse_json(b'{"1_2_3": 0, "4_5_6": 1, "1_2_3": 2}', "p")
    assert table(found) == {"xyz": [[1, 2, 3], [4, 5, 6], [1, 2, 3]], "record": [0, 1, 2]}


def nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    return b'{"1_2_3": ' + opening * depth + b"0" + closing * depth + b"}"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b" ", id="space"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'[{"1_2_3": 0}]', id="list of objects"),
        pytest.param(b'"1_2_3"', id="string"),
        pytest.param(b"0", id="number"),
        pytest.param(b'{"1_2_3": 0', id="cut"),
        pytest.param(b'{"1_2_3": 0}x', id="more behind it"),
        pytest.param(b'{"1_2_3": 0}\x00', id="NUL behind it"),
        pytest.param(b'{"1_2_3": 0}{"1_2_4": 1}', id="two documents"),
        pytest.param(b'{"1_2_3": 0,}', id="comma"),
        pytest.param(b"{'1_2_3': 0}", id="single quotes"),
        pytest.param(b'{"1_2_3": -1}', id="negative"),
        pytest.param(b'{"1_2_3": -0.0}', id="negative zero"),
        pytest.param(b'{"1_2_3": 0.0}', id="float"),
        pytest.param(b'{"1_2_3": 1e3}', id="exponent"),
        pytest.param(b'{"1_2_3": NaN}', id="NaN"),
        pytest.param(b'{"1_2_3": Infinity}', id="Infinity"),
        pytest.param(b'{"1_2_3": null}', id="null value"),
        pytest.param(b'{"1_2_3": true}', id="true"),
        pytest.param(b'{"1_2_3": "0"}', id="text"),
        pytest.param(b'{"1_2_3": [0]}', id="list value"),
        pytest.param(b'{"1_2_3": {"1_2_3": 0}}', id="object value"),
        pytest.param(b'{"1_2_3": {}}', id="empty object value"),
        pytest.param(b'{"1_2_3": 4611686018427387904}', id="2**62"),
        pytest.param(b'{"1_2_3": ' + b"9" * 4000 + b"}", id="4000 digits"),
        pytest.param(b'{"1_2_3": ' + b"9" * 100_000 + b"}", id="100,000 digits"),
        pytest.param(b'{"' + b"9" * 100_000 + b'_2_3": 0}', id="100,000 digits in a key"),
        pytest.param(b'{"1_2": 0}', id="two coordinates"),
        pytest.param(b'{"1_2_3_4": 0}', id="four coordinates"),
        pytest.param(b'{"": 0}', id="no key"),
        pytest.param(b'{"1_2_3\\n": 0}', id="line end in a key"),
        pytest.param(b'{" 1_2_3": 0}', id="space in a key"),
        pytest.param(b'{"+1_2_3": 0}', id="plus"),
        pytest.param(b'{"1,2,3": 0}', id="commas"),
        pytest.param(b'{"1_2_0x3": 0}', id="hexadecimal"),
        pytest.param('{"\u0661_2_3": 0}'.encode(), id="digits of another script"),
        pytest.param(b'{"\\ud800": 0}', id="half a surrogate pair"),
        pytest.param(b'{"\xff": 0}', id="no UTF-8"),
        pytest.param(b"\x00" * 1000, id="zeros"),
        pytest.param(b"[" * 100_000, id="100,000 brackets"),
        pytest.param(b'{"a":' * 100_000, id="100,000 braces"),
        pytest.param(nested(b"[", b"]", 100_000), id="100,000 lists"),
        *(pytest.param(nested(b"[", b"]", n), id=f"{n} lists") for n in (100, 480, 900, 960, 990, 5000)),
        *(pytest.param(nested(b'{"a":', b"}", n), id=f"{n} objects") for n in (100, 480, 900, 960, 990, 5000)),
        pytest.param(REC + b"1,2,3,0\n", id="CSV"),
    ],
)
def test_what_is_no_json_index_is_refused(data: bytes) -> None:
    with pytest.raises(ShardIndexError) as caught:
        parse_json(data, "s0/0_0_0.json")
    error = caught.value
    assert error.path == "s0/0_0_0.json"
    assert error.advice is not None
    message = str(error)
    assert message.startswith("s0/0_0_0.json: the index ")
    assert "expected None" not in message
    assert len(message) < 1000
