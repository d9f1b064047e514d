"""Inputs that were once good: files with bytes changed, and JSON with values that nobody expects in its places."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

from hypothesis import strategies as st

DEEP, FAR = "@deep@", "@far@"
_TOKENS = [b"", b"\0", b"\xff\xfe", b'"', b"{", b"]", b",", b":", b"1e999", b"NaN", b"\\ud800", b"-", b"0" * 400]

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.sampled_from([2**31, 2**63 - 1, 2**63, 10**400, -(2**64)]),
    st.floats(), st.text(max_size=6), st.sampled_from([
        DEEP, FAR, math.nan, math.inf, "", "\0", "\x1b[2J", "../../x", "é" * 5000, "\U0010ffff", "__class__",
        "shard(0)", "shard(-1)", "shard(63, split=9)", "partial(sum)", "replicate", "input:x", "[]", "os.system('x')",
    ]),
    st.lists(st.integers(-2, 5), max_size=3), st.dictionaries(st.text(max_size=4), st.none(), max_size=2),
)  # fmt: skip


@st.composite
def changed_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """One to three edits: cut off, overwrite, insert, remove, repeat."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 1, 2, 8, 64]))
        new = draw(st.binary(max_size=8) | st.sampled_from(_TOKENS))
        kind = draw(st.sampled_from(["cut", "overwrite", "insert", "remove", "repeat"]))
        if kind == "cut":
            del data[at:]
        elif kind == "repeat":
            data[at:at] = data[at : at + length]
        else:
            data[at : at + {"overwrite": len(new), "insert": 0, "remove": length}[kind]] = (
                b"" if kind == "remove" else new
            )
    return bytes(data)


@st.composite
def changed_json(draw: st.DrawFn, good: Any) -> bytes:
    """One to three values replaced, removed, added, moved or doubled, and sometimes the text itself changed."""
    content = [copy.deepcopy(good)]
    for _ in range(draw(st.integers(1, 3))):
        parent, key = draw(st.sampled_from(list(_places(content))))
        kind = draw(st.sampled_from(["replace", "replace", "remove", "add", "move"]))
        if kind == "replace":
            parent[key] = draw(VALUES)
        elif kind == "remove":
            del parent[key]
        elif kind == "move":
            other, there = draw(st.sampled_from(list(_places(content))))
            other[there] = copy.deepcopy(parent[key])
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=4) | st.just(str(key) + " "))] = draw(VALUES)
        else:
            parent.append(draw(VALUES))
        if not content:
            break
    text = json.dumps(content[0] if content else None)
    text = text.replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000).replace(f'"{FAR}"', "9" * 5000)
    if draw(st.integers(0, 5)) == 0 and text.startswith("{"):
        text = "{" + text[1 : text.find(",") + 1] + text[1:]  # its first key twice
    data = text.encode(errors="surrogatepass")
    return draw(changed_bytes(data)) if draw(st.integers(0, 3)) == 0 else data


def _places(content: Any) -> Any:
    """Every (container, key) in a tree of JSON."""
    keys = content.keys() if isinstance(content, dict) else range(len(content))
    for key in list(keys):
        yield content, key
        if isinstance(content[key], (dict, list)):
            yield from _places(content[key])
