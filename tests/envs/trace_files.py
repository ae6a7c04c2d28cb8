"""Small files of every format that is read, as a test needs them."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import zstandard

from envs.workloads.readers.cachesim import RECORD

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "bz2": lambda data: bz2.compress(data, 1),
    "xz": lzma.compress,
}
"""How a file is packed, by the ending of its name."""

AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:00.017335+00:00,2399,6\n2024-05-10 00:00:01+00:00,76,15\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
    "45,GPT-4,1087,230,1317,Conversation log\n45,ChatGPT,9,0,9,API log\n118,GPT-4,417,276,693,API log\n"
)
BURSTGPT_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5.5,71a,3.2,ChatGPT,472,18,490,Conversation log\n6.5,,1.0,GPT-4,7,8,15,API log\n"
)
SERVEGEN = (
    "time_s,rate_total,active_clients,cv_rate_weighted,rate_c61,rate_c142,rate_others\n"
    "0,3.0,3,1.5,2.0,0.5,0.5\n600,2.0,2,1.0,0.0,1.0,1.0\n"
)
CACHESIM = "version,time,op,size,lbn\n1,33898,2a,512,42932745\n1,33898,2a,6656,40409911\n1,33899,2a,512,42932745\n"
COMMON_LOG = (
    '127.0.0.1 - frank [10/Oct/2000:13:55:36 -0700] "GET /a?x=1 HTTP/1.0" 200 2326\n'
    '127.0.0.1 - - [10/Oct/2000:13:55:37 -0700] "POST /a HTTP/1.0" 200 5\n'
    '127.0.0.1 - - [10/Oct/2000:13:55:38 -0700] "GET /gone HTTP/1.0" 404 5\n'
    '::1 - - [10/Oct/2000:20:55:40 +0000] "GET /a?x=1 HTTP/1.1" 304 -\n'
)
COMBINED_LOG = (
    '10.0.0.1 - - [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 8000 "http://x/y?q=\\"z\\"" "Mozilla/5.0 (X11; [en])"\n'
    '10.0.0.1 - - [17/May/2015:10:05:04 +0000] "-" 408 0 "-" "-"\n'
    '10.0.0.1 - - [17/May/2015:10:05:05 +0000] "GET /b HTTP/1.1" 206 100 "-" "curl"\n'
)


def bailian_lines(*requests: tuple[float, str, list[int]]) -> str:
    """Return Qwen-Bailian lines of requests: time, type, blocks."""
    return "".join(
        orjson.dumps(
            {
                "chat_id": number,
                "parent_chat_id": -1,
                "timestamp": at,
                "input_length": 16 * len(blocks),
                "output_length": 9,
                "type": kind,
                "turn": 1,
                "hash_ids": blocks,
            }
        ).decode()
        + "\n"
        for number, (at, kind, blocks) in enumerate(requests)
    )


def oracle_records(time: npt.ArrayLike, objects: npt.ArrayLike, size: npt.ArrayLike) -> bytes:
    """Return libCacheSim oracleGeneral records with their next accesses filled in."""
    records = np.zeros(len(np.asarray(time)), RECORD)
    records["time"], records["object"], records["size"], records["next"] = time, objects, size, -1
    seen: dict[int, int] = {}
    for place in range(len(records) - 1, -1, -1):
        name = int(records["object"][place])
        records["next"][place] = seen.get(name, -1)
        seen[name] = place
    return records.tobytes()


def write(folder: Path, name: str, data: str | bytes) -> Path:
    """Write a file, packed as its name's ending says."""
    raw = data.encode() if isinstance(data, str) else data
    path = folder / name
    packer = PACKERS.get(name.rsplit(".", 1)[-1])
    path.write_bytes(packer(raw) if packer else raw)
    return path
