"""What becomes of an entry, whichever tier it is in: the lists of what means the same, and its end."""

from __future__ import annotations

from envs.simulator.state import (
    GROUP,
    MATCH,
    MEMORY_BYTES,
    MEMORY_ENTRIES,
    NEWER,
    OLDER,
    STORE_BYTES,
    STORE_ENTRIES,
    State,
)
from serving.compiled import compiled


@compiled(allocates=False)
def leave_group(state: State, key: int) -> None:
    """Take the entry out of the list of its group, which it is in."""
    kin = state.kin
    newer, older = kin[key, NEWER], kin[key, OLDER]
    if newer:
        kin[newer, OLDER] = older
    else:
        state.newest[kin[key, GROUP]] = older
    if older:
        kin[older, NEWER] = newer


@compiled(allocates=False)
def join_group(state: State, key: int, group: int) -> None:
    """Make the entry the newest of the group."""
    kin, front = state.kin, state.newest[group]
    kin[key, NEWER], kin[key, OLDER], kin[key, GROUP] = 0, front, group
    if front:
        kin[front, NEWER] = key
    state.newest[group] = key


@compiled(allocates=False)
def drop(state: State, key: int) -> None:
    """Remove the entry, if it is there, from both tiers."""
    record, ints = state.records[key], state.ints
    if record.held > 0:
        ints[STORE_BYTES] -= record.held
        ints[STORE_ENTRIES] -= 1
        if record.resident:
            ints[MEMORY_BYTES] -= record.held
            ints[MEMORY_ENTRIES] -= 1
            record.resident = 0
        record.held = 0
        if state.params[MATCH] > 0.0 and state.kin[key, GROUP]:
            leave_group(state, key)
