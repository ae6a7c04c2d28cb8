"""The compiled core of :mod:`serving.ghost`: one generation of the sampled shadow.

Recency is a log: every access of a tracked key appends its slot, and each size of the grid has a marker in the log such that its
residents are the entries from there on. Eviction moves the marker, so an access costs O(sizes), whatever the number of keys.

When a setting wrote an entry is always the time of an access, and most settings agree on it. So a key keeps the time of its last
access, at which every setting wrote that no record of the key names, and records of (time, set of settings). That is exact, and
takes a few records instead of one number per setting.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from serving.compiled import compiled
from serving.ghost_state import BUDGET, EVICTED, HELD, MARKER, MOVED, PLANES, RECORDS_PER_KEY, UNIT, Floats, State, Words

_LEAST_HEAT = 8
"""Fewer recent accesses never make a key hot."""

_JITTER = np.uint64(0x7474_6C00)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_BYTE = np.uint64(255)


@compiled("uint64(uint64)")
def mix64(value: int | np.uint64) -> np.uint64:
    """:func:`serving.keys.mix64`, compiled."""
    z = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled("float64[::1](uint64[::1])")
def jitter_units(keys: Words) -> Floats:
    """Return where in 0..1 each key's TTL jitter lies: ``ttl_jitter(key, spread) == 1 - spread * unit``."""
    units = np.empty(len(keys))
    for row in range(len(keys)):
        units[row] = mix64(keys[row] ^ _JITTER) / 2.0**64
    return units


@compiled(allocates=False)
def set_rate(state: State) -> None:
    """Derive weight and hash limit from ``multiple``."""
    control = state.control[0]
    control.weight = control.multiple / UNIT
    control.limit = ~_ZERO if control.multiple == UNIT else (~_ZERO // np.uint64(control.multiple)) * np.uint64(UNIT) - _ONE


@compiled(allocates=False)
def _warmer(state: State, mixed: np.uint64, step: int) -> int:
    """Recent accesses by the sketch (never too few below its ceiling), after adding ``step`` (conservative update)."""
    sketch = state.sketch
    mask = np.uint64(sketch.shape[1] - 1)
    first, second = np.int64((mixed >> np.uint64(4)) & mask), np.int64((mixed >> np.uint64(22)) & mask)
    heat: int = min(sketch[0, first], sketch[1, second])
    if step and heat < 255:
        heat += 1
        sketch[0, first] = max(sketch[0, first], np.uint8(heat))
        sketch[1, second] = max(sketch[1, second], np.uint8(heat))
    return heat


@compiled(allocates=False)
def _least_heat(state: State) -> int:
    """Accesses from which on a key is hot: no more keys than slots can have so many."""
    least: int = max(_LEAST_HEAT, state.control[0].counted // len(state.slots))
    return least


@compiled(allocates=False)
def settle(state: State) -> None:
    """Move what the planes hold into ``sums``, at the present weight."""
    control, planes = state.control[0], state.planes
    cells = state.levels.shape[1] * len(state.ttls)
    for block in range(2):
        weight = 1.0 if block else control.weight
        for cell in range(cells):
            hits = np.int64(0)
            for plane in range(PLANES):
                hits += np.int64((planes[block, plane, cell // 64] >> np.uint64(cell % 64)) & _ONE) << plane
            state.sums[2 * block, cell] += weight * hits
        for plane in range(PLANES):
            for word in range(planes.shape[2]):
                planes[block, plane, word] = _ZERO
    control.sampled += control.weight * control.seen
    control.certain += control.known
    control.seen = 0
    control.known = 0


@compiled(allocates=False)
def _free_records(state: State, slot: int) -> None:
    """Give back every record of a key."""
    control, words = state.control[0], state.masks.shape[1]
    record = np.int64(state.slots[slot].record)
    while record != 0:
        after = np.int64(state.records[record, words])
        state.records[record, words] = control.free_record
        control.free_record = record
        control.recorded -= 1
        record = after
    state.slots[slot].record = 0


@compiled(allocates=False)
def _rebuild(state: State) -> None:
    """Close the gaps in the log and keep only the marked slots; markers stay between the same entries, bytes are counted anew."""
    control, slots, log, levels, table = state.control[0], state.slots, state.log, state.levels, state.table
    rows = levels.shape[1]
    for row in range(rows):
        levels[HELD, row], levels[MOVED, row] = 0.0, -1.0
    last = 0
    for position in range(1, control.next):
        slot = log[position] - 1
        for row in range(rows):
            if levels[MOVED, row] < 0.0 and position >= levels[MARKER, row]:
                levels[MOVED, row] = last + 1
        log[position] = 0
        state.sizes[position] = 0.0
        if slot >= 0 and slots[slot].keep:
            last += 1
            log[last] = slot + 1
            state.sizes[last] = -slots[slot].size if slots[slot].hot else slots[slot].size
            slots[slot].position = last
            size = slots[slot].size
            weighted = size if slots[slot].hot else size * control.weight
            for row in range(rows):
                if levels[MOVED, row] >= 0.0 and size <= levels[BUDGET, row]:
                    levels[HELD, row] += weighted
    for row in range(rows):
        levels[MARKER, row] = levels[MOVED, row] if levels[MOVED, row] >= 0.0 else last + 1
    control.next = last + 1
    mask = len(table) - 1
    for place in range(len(table)):
        table[place] = 0
    control.tracked, control.hot, control.free_slot = 0, 0, 0
    for slot in range(len(slots) - 1, -1, -1):
        entry = slots[slot]
        if entry.keep:
            control.tracked += 1
            control.hot += entry.hot
            cell = np.int64(mix64(entry.name ^ control.salt)) & mask
            while table[cell] != 0:
                cell = (cell + 1) & mask
            table[cell] = slot + 1
        else:
            _free_records(state, slot)
            entry.hot, entry.position, entry.count, entry.before = 0, 0, 0, 0
            entry.next_free = control.free_slot
            control.free_slot = slot + 1


@compiled(allocates=False)
def _mark_anew(state: State) -> None:
    """Set every marker from the bytes behind it, after the weights have changed."""
    control, levels = state.control[0], state.levels
    for row in range(levels.shape[1]):
        held, marker = 0.0, np.int64(control.next)
        while marker > 1:
            size = abs(state.sizes[marker - 1])
            if size <= levels[BUDGET, row]:
                if held + size > levels[BUDGET, row]:
                    break
                held += size if state.sizes[marker - 1] < 0.0 else size * control.weight
            marker -= 1
        levels[HELD, row], levels[MARKER, row] = held, marker


@compiled(allocates=False)
def _mark_used(state: State) -> None:
    """Mark the slots that are in use."""
    for slot in range(len(state.slots)):
        state.slots[slot].keep = 0
    for cell in range(len(state.table)):
        if state.table[cell] != 0:
            state.slots[state.table[cell] - 1].keep = 1


@compiled(allocates=False)
def _make_room(state: State, now: float) -> None:
    """Drop keys that no setting can hit any more; where that frees less than an eighth, lower the sampling rate.

    Hot keys are kept whatever the rate; cooled ones are left to the sample, and hot ones of the sample taken out of it.
    """
    settle(state)
    control, slots, words = state.control[0], state.slots, state.masks.shape[1]
    capacity, most, most_records = len(slots), len(slots) * 7 // 8, len(state.written) * 7 // 8
    longest, oldest = state.ttls[-1], state.levels[MARKER, 0]
    for row in range(state.levels.shape[1]):
        oldest = min(oldest, state.levels[MARKER, row])
    least = _least_heat(state)
    tracked, recorded, reweighted = 0, 0, False
    _mark_used(state)
    for slot in range(capacity):
        entry = slots[slot]
        if not entry.keep:
            continue
        mixed = mix64(entry.name ^ control.salt)
        # Keys of this window and of the last one are kept in any case: entropy and drift are made of them. What is too old is so
        # from the log's beginning on, so that dropping it changes no distance.
        hittable = entry.position >= oldest and now - entry.last <= longest
        entry.keep = hittable or entry.count > 0 or entry.before > 0
        if entry.keep and entry.hot and 4 * _warmer(state, mixed, 0) < least:
            entry.hot = 0
            control.hot -= 1
            reweighted = True
            entry.keep = mixed <= control.limit
        if entry.keep:
            entry.cost = 0
            record = np.int64(entry.record)
            while record != 0:
                entry.cost += 1
                record = np.int64(state.records[record, words])
            tracked += 1
            recorded += entry.cost
    if tracked > most or recorded > most_records:
        reweighted = True
        for slot in range(capacity):
            entry = slots[slot]
            if entry.keep and not entry.hot and control.hot < control.most_hot:
                entry.hot = _warmer(state, mix64(entry.name ^ control.salt), 0) >= least
                control.hot += entry.hot
    while (tracked > most or recorded > most_records) and tracked > control.hot:
        control.multiple += max(control.multiple // 8, 1)
        set_rate(state)
        tracked, recorded = 0, 0
        for slot in range(capacity):
            entry = slots[slot]
            entry.keep = entry.keep and (entry.hot or mix64(entry.name ^ control.salt) <= control.limit)
            if entry.keep:
                tracked += 1
                recorded += entry.cost
    if recorded > most_records:
        # Few keys with many records: those are then taken for written at their last access.
        for slot in range(capacity):
            if slots[slot].keep and slots[slot].cost > RECORDS_PER_KEY:
                _free_records(state, slot)
    _rebuild(state)
    if reweighted:
        _mark_anew(state)


@compiled(allocates=False)
def _age(state: State, now: float) -> None:
    """Halve the sketch, so that it says what is hot lately."""
    sketch, control = state.sketch, state.control[0]
    for row in range(2):
        for cell in range(sketch.shape[1]):
            sketch[row, cell] >>= 1
    control.counted //= 2
    if 2 * control.hot > control.most_hot:
        _make_room(state, now)


@compiled(allocates=False)
def _find(state: State, name: np.uint64, mixed: np.uint64) -> int:
    """Return the slot of a key, -1 if it is not tracked."""
    table, slots = state.table, state.slots
    mask = len(table) - 1
    cell = np.int64(mixed) & mask
    slot: int = table[cell] - 1
    while slot >= 0 and slots[slot].name != name:
        cell = (cell + 1) & mask
        slot = table[cell] - 1
    return slot


@compiled(allocates=False)
def _track(state: State, name: np.uint64, mixed: np.uint64) -> int:
    """Give a free slot to a key."""
    table, control = state.table, state.control[0]
    mask = len(table) - 1
    cell = np.int64(mixed) & mask
    while table[cell] != 0:
        cell = (cell + 1) & mask
    slot: int = control.free_slot - 1
    control.free_slot = state.slots[slot].next_free
    control.tracked += 1
    table[cell] = slot + 1
    state.slots[slot].name = name
    return slot


@compiled(allocates=False)
def _add_stale(state: State, block: int, word: int, cells: np.uint64, amount: float) -> None:
    """Add to the stale hits of the settings in one word."""
    sums, row, begin = state.sums, 2 * block + 1, 64 * word
    end = min(begin + 64, sums.shape[1])
    while cells != _ZERO:  # eight at a time: a record mostly names the settings of one or two TTLs
        if cells & _BYTE:
            for setting in range(begin, min(begin + 8, end)):
                sums[row, setting] += amount if (cells >> np.uint64(setting - begin)) & _ONE else 0.0
        cells >>= np.uint64(8)
        begin += 8


@compiled(allocates=False)
def _look_up(state: State, slot: int, name: np.uint64, now: float, counted: int) -> None:
    """Find which settings the access hits (``counted``: 0 in the sample, 1 of a hot key, -1 not), and let the others write."""
    control, entry, masks, records = state.control[0], state.slots[slot], state.masks, state.records
    rows, columns, words = state.levels.shape[1], len(state.ttls), state.masks.shape[1]
    ttls, first_column = state.ttls, 2 * rows + 1
    resident, hits, unnamed = first_column + columns + 1, first_column + columns + 2, first_column + columns + 3
    life = 1.0 - control.jitter * (mix64(name ^ _JITTER) / 2.0**64)
    half_life = control.half_life
    weight = 1.0 if counted == 1 else control.weight
    for word in range(words):
        masks[hits, word] = _ZERO
        masks[unnamed, word] = masks[first_column, word]
    fresh = 0
    for column in range(columns):
        fresh += now - entry.last > ttls[column] * life
    expired = fresh
    previous, record = np.int64(0), np.int64(entry.record)
    while record != 0:
        after = np.int64(records[record, words])
        age = now - state.written[record, words + 1]
        expired = 0
        for column in range(columns):
            expired += age > ttls[column] * life
        left = _ZERO
        for word in range(words):
            masks[unnamed, word] &= ~records[record, word]
            kept = records[record, word] & masks[resident, word] & masks[first_column + expired, word]
            records[record, word] = kept
            masks[hits, word] |= kept
            left |= kept
        if left == _ZERO:
            if previous:
                records[previous, words] = after
            else:
                entry.record = after
            records[record, words] = control.free_record
            control.free_record = record
            control.recorded -= 1
        else:
            previous = record
            if half_life < math.inf and counted >= 0:
                amount = weight * (1.0 - 0.5 ** (age / half_life))
                for word in range(words):
                    _add_stale(state, counted, word, records[record, word], amount)
        record = after
    age = now - entry.last
    left = _ZERO
    for word in range(words):
        kept = masks[unnamed, word] & masks[resident, word] & masks[first_column + fresh, word]
        masks[unnamed, word] = kept
        masks[hits, word] |= kept
        left |= kept
    if left != _ZERO:
        if half_life < math.inf and counted >= 0:
            amount = weight * (1.0 - 0.5 ** (age / half_life))
            for word in range(words):
                _add_stale(state, counted, word, masks[unnamed, word], amount)
        record = np.int64(control.free_record)
        if age > 0.0:
            control.free_record = np.int64(records[record, words])
            control.recorded += 1
            state.written[record, words + 1] = entry.last
            for word in range(words):
                records[record, word] = masks[unnamed, word]
            records[record, words] = entry.record
            entry.record = record
    if counted >= 0:
        for word in range(words):
            carry, plane = masks[hits, word], 0
            while carry != _ZERO:
                held = state.planes[counted, plane, word]
                state.planes[counted, plane, word] = held ^ carry
                carry &= held
                plane += 1


@compiled(allocates=False)
def _evict(state: State, row: int) -> None:
    """Move one size's marker on while what it holds exceeds the budget."""
    control, levels = state.control[0], state.levels
    held, budget, marker = levels[HELD, row], levels[BUDGET, row], np.int64(levels[MARKER, row])
    while held > budget and marker < control.next:
        size = abs(state.sizes[marker])
        if size <= budget:
            weighted = size if state.sizes[marker] < 0.0 else size * control.weight
            # An entry stands for others before it, but for its own fit only its own bytes count.
            if held - weighted + size <= budget:
                break
            held -= weighted
        marker += 1
    levels[EVICTED, row] = 1.0
    levels[HELD, row], levels[MARKER, row] = held, marker


@compiled(allocates=False)
def _access(state: State, key: np.uint64, size: float, now: float) -> None:
    """Account for one access to ``key``, whose entry has ``size`` bytes, at time ``now``."""
    control, slots, levels, masks = state.control[0], state.slots, state.levels, state.masks
    control.requests += 1.0
    mixed = mix64(key ^ control.salt)
    control.counted += 1
    if control.counted >= 16 * len(slots):
        _age(state, now)
    heat = _warmer(state, mixed, 1)
    sampled = mixed <= control.limit
    hot = control.multiple > UNIT and control.hot < control.most_hot and heat >= _least_heat(state)
    slot = _find(state, key, mixed)
    if slot < 0:
        if not (sampled or hot):
            return
        if control.free_slot == 0:
            _make_room(state, now)
            sampled = mixed <= control.limit
            hot = hot and control.hot < control.most_hot
            if control.free_slot == 0 or not (sampled or hot):
                return
        slot = _track(state, key, mixed)
    if control.free_record == 0:
        _make_room(state, now)
        slot = _find(state, key, mixed)
        if slot < 0:
            return
        sampled = mixed <= control.limit
    if control.next == len(state.log):
        _mark_used(state)
        _rebuild(state)
    if control.seen + control.known == (1 << PLANES) - 1:
        settle(state)

    # A key that is neither hot nor in the sample is on its way to become hot: nothing is known of its past, so it counts from the
    # next access on, and this one is left to the sample.
    entry = slots[slot]
    counted = 1 if entry.hot else 0 if sampled else -1
    if counted == 1:
        control.known += 1
    elif counted == 0:
        control.seen += 1
    entry.count += 1
    rows, words = levels.shape[1], state.masks.shape[1]
    position = entry.position
    if position > 0:
        before = entry.size
        weighted = before if entry.hot else before * control.weight
        resident = 2 * rows + len(state.ttls) + 2
        smallest, holding = rows, 0
        for row in range(rows):
            holds = (position >= levels[MARKER, row]) & (before <= levels[BUDGET, row])
            levels[HELD, row] -= weighted if holds else 0.0
            smallest = min(smallest, row if holds else rows)
            holding += holds
        for word in range(words):
            masks[resident, word] = masks[rows + smallest, word]
        if holding < rows - smallest:
            # A larger size need not hold what a smaller one does: it stores entries that the smaller one turns away.
            for row in range(smallest, rows):
                if not position >= levels[MARKER, row]:
                    for word in range(words):
                        masks[resident, word] &= ~masks[row, word]
        state.log[position] = 0
        state.sizes[position] = 0.0
        if holding:
            _look_up(state, slot, key, now, counted)
        else:
            _free_records(state, slot)
    if hot and not entry.hot:
        entry.hot = 1
        control.hot += 1
    entry.size, entry.last, entry.position = size, now, control.next
    state.log[control.next] = slot + 1
    state.sizes[control.next] = -size if entry.hot else size
    control.next += 1
    weighted = size if entry.hot else size * control.weight
    over = 0
    for row in range(rows):
        levels[HELD, row] += weighted if size <= levels[BUDGET, row] else 0.0
        over += levels[HELD, row] > levels[BUDGET, row]
    if over:
        for row in range(rows):
            if levels[HELD, row] > levels[BUDGET, row]:
                _evict(state, row)


@compiled(allocates=False)
def access_many(state: State, keys: Words, sizes: npt.NDArray[np.int64], times: Floats) -> None:
    """Account for many accesses in order of time."""
    if len(keys) and math.isnan(state.control[0].start):
        state.control[0].start = times[0]
    if len(keys):
        state.control[0].now = times[-1]
    for row in range(len(keys)):
        _access(state, keys[row], max(np.float64(sizes[row]), 0.0), times[row])


@compiled(allocates=False)
def distribution(state: State, into: Floats) -> None:
    """Fill in the window's entropy (bits) and drift, (2,), and begin a new window: its counts become those of the last one.

    Entropy is ``log2 N - sum(c log2 c) / N`` over the counts, Miller-Madow corrected; sampled keys are scaled to what they stand
    for. Drift is the Jensen-Shannon distance, base 2, to the window before; each key stands for as many like it as its weight.
    """
    control, slots = state.control[0], state.slots
    known = drawn = known_bits = drawn_bits = keys = total = before = 0.0
    for index in range(len(slots)):
        slot = slots[index]
        weight = 1.0 if slot.hot else control.weight
        total += weight * slot.count
        before += weight * slot.before
        if slot.count > 0:
            bits = slot.count * math.log2(slot.count) if slot.count > 1 else 0.0
            keys += weight
            if slot.hot:
                known += slot.count
                known_bits += bits
            else:
                drawn += slot.count
                drawn_bits += bits
    into[0] = into[1] = math.nan
    requests = control.requests
    if keys > 0.0 and requests > 0.0:
        scale = max(requests - known, 0.0) / drawn if drawn > 0.0 else 0.0
        counted = known + scale * drawn
        plugin = max(math.log2(counted) - (known_bits + scale * drawn_bits) / counted, 0.0)
        into[0] = plugin + (keys - 1.0) / (2.0 * math.log(2.0) * requests)
    divergence, comparable = 0.0, total > 0.0 and before > 0.0
    for index in range(len(slots)):
        slot = slots[index]
        if comparable and (slot.count > 0 or slot.before > 0):
            p, q = slot.count / total, slot.before / before
            each = p * math.log2(2.0 * p / (p + q)) if p > 0.0 else 0.0
            each += q * math.log2(2.0 * q / (p + q)) if q > 0.0 else 0.0
            divergence += each * (1.0 if slot.hot else control.weight)
        slot.before = slot.count
        slot.count = 0
    if comparable:
        into[1] = math.sqrt(min(max(divergence / 2.0, 0.0), 1.0))


@compiled(allocates=False)
def forget(state: State) -> None:
    """Empty every setting's virtual cache; the window's counts stay."""
    for position in range(1, state.control[0].next):
        slot = state.log[position] - 1
        if slot >= 0:
            state.slots[slot].position = 0
            _free_records(state, slot)
        state.log[position] = 0
        state.sizes[position] = 0.0
    for row in range(state.levels.shape[1]):
        state.levels[HELD, row], state.levels[MARKER, row], state.levels[EVICTED, row] = 0.0, 1.0, 1.0
    state.control[0].next = 1


def begin(state: State) -> None:
    """Make a new generation ready; compiles all that it needs, or reads the cache of compiled code, so that no request waits."""
    set_rate(state)
    access_many(state, np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0))
    settle(state)
    distribution(state, np.empty(2))
    forget(state)
    state.levels[EVICTED] = 0.0
