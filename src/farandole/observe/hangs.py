# Finds out for which rank the others wait, for which operation, and what that rank does instead.
# Pure: it gets the facts of all ranks and returns a verdict with its reason.
"""Each rank that waits in an operation waits for the members of its group that have not submitted it. The cause is a
rank that others wait for and that does not wait itself. If all wait in a circle, they disagree about the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farandole.observe.facts import Facts
from farandole.observe.records import PRECONDITION, Operation, Record
from farandole.observe.stacks import ranks_text

# The kinds of a verdict.
NEVER_SUBMITTED = "never submitted"
OTHER_ORDER = "other order"
OTHER_SHAPE = "other shape"
STOPPED = "stopped process"
LOADER = "in a data loader"
LOCK = "in a lock"
FILES = "in the file system"
SLOW_LINK = "slow link"
LOST = "lost"
NOTHING = "nothing is wrong"
SHOWN = 4  # ranks that are described one by one
MOST_RANKS = 16


@dataclass(frozen=True)
class Wait:
    """A rank waits for others, which have not submitted the operation."""

    rank: int
    operation: Operation
    seconds: float
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """What is wrong, and what to tell the user."""

    kind: str
    ranks: tuple[int, ...]  # the cause
    operation: str  # for which the others wait; "" when they do not
    seconds: float  # since when
    text: str
    waiting: tuple[int, ...] = ()

    @property
    def names_a_cause(self) -> bool:
        """Whether it names a cause."""
        return self.kind != NOTHING

    @property
    def same_as(self) -> tuple[object, ...]:
        """Equal for two verdicts about one hang."""
        return self.kind, self.ranks, self.operation


def judge(ranks: Mapping[int, Facts], lost: Sequence[int] = (), slow: Sequence[str] = ()) -> Verdict:
    """`lost`: ranks of which the agent said nothing. `slow`: what was said of slow ranks and links a short time ago."""
    waits = {rank: wait for rank, facts in ranks.items() if (wait := _wait_of(facts, ranks, lost)) is not None}
    if not waits:
        return _moving(ranks, lost, slow)
    causes = _causes(waits, ranks, lost)
    if not causes:
        return _disagreement(waits, ranks)
    about = [wait for wait in waits.values() if set(wait.missing) & causes] or list(waits.values())
    first = max(about, key=lambda wait: wait.seconds)
    # If there are several causes: those that the oldest operation waits for.
    named = tuple(sorted(causes & set(first.missing) or causes))
    kinds = [_kind_of(rank, ranks, lost) for rank in named]
    kind = next((one for one in (LOST, STOPPED) if one in kinds), kinds[0])
    who = [rank for rank, one in zip(named, kinds, strict=True) if one == kind] if kind in (LOST, STOPPED) else named
    waiting = tuple(sorted(rank for rank, wait in waits.items() if wait.operation.name == first.operation.name))
    return Verdict(kind, tuple(who), first.operation.name, first.seconds, _sentences(first, waiting, who, ranks, lost),
                   waiting)  # fmt: skip


def _wait_of(facts: Facts, ranks: Mapping[int, Facts], lost: Sequence[int]) -> Wait | None:
    """The oldest operation for which this rank waits for others."""
    for operation in facts.pending:
        if not operation.waits and not (operation.between_two and operation.pending):
            continue
        missing = _missing(facts, operation, ranks, lost)
        if missing:
            return Wait(facts.rank, operation, facts.age(operation), missing)
    return None


def _missing(facts: Facts, operation: Operation, ranks: Mapping[int, Facts], lost: Sequence[int]) -> tuple[int, ...]:
    assert facts.record is not None
    if operation.between_two:
        wanted = {"send": "receive", "receive": "send"}[operation.kind]
        other = ranks.get(operation.peer)
        submitted = other is not None and any(
            one.kind == wanted and one.peer in (facts.rank, -1) for one in other.pending
        )
        # A small send is done when it is sent, so the other side of a receive may have gone on.
        return () if operation.peer < 0 or submitted else (operation.peer,)
    members = facts.record.groups.get(operation.group)
    if members is None:
        members = tuple(sorted({*ranks, *lost})) if operation.group == 0 else ()
    return tuple(rank for rank in members if rank != facts.rank and not _has_submitted(ranks.get(rank), operation))


def _has_submitted(facts: Facts | None, operation: Operation) -> bool:
    if facts is None or facts.record is None:
        return False
    return any(
        one.group == operation.group and one.name == operation.name and one.generation == operation.generation
        for one in facts.pending
    )


def _causes(waits: Mapping[int, Wait], ranks: Mapping[int, Facts], lost: Sequence[int]) -> set[int]:
    """The ranks at the ends of the chains of waiting."""
    found: set[int] = set()
    for wait in waits.values():
        seen: set[int] = set()
        left = list(wait.missing)
        while left:
            rank = left.pop()
            if rank in seen:
                continue
            seen.add(rank)
            facts = ranks.get(rank)
            if facts is None or rank in lost or rank not in waits or not facts.waits_in_an_operation:
                found.add(rank)
            else:
                left += waits[rank].missing
    return found


def _kind_of(rank: int, ranks: Mapping[int, Facts], lost: Sequence[int]) -> str:
    facts = ranks.get(rank)
    if facts is None or rank in lost or facts.state in ("X", "Z"):
        return LOST
    if facts.stopped:
        return STOPPED
    if facts.loading is not None:
        return LOADER
    if facts.in_the_file_system and not facts.in_a_lock_of_a_file:
        return FILES
    if facts.in_a_lock or facts.in_a_lock_of_a_file:
        return LOCK
    return NEVER_SUBMITTED


def _moving(ranks: Mapping[int, Facts], lost: Sequence[int], slow: Sequence[str]) -> Verdict:
    """Nobody waits for a rank to submit something: bytes move, or all compute."""
    moving = [(facts, one) for facts in ranks.values() for one in facts.pending]
    if moving:
        facts, operation = max(moving, key=lambda pair: pair[0].age(pair[1]))
        seconds = facts.age(operation)
        waiting = tuple(sorted({facts.rank for facts, _ in moving}))
        about = f"{title(operation)} runs for {seconds:.1f} s on {_count('rank', waiting)}"
        stopped = tuple(rank for rank, one in sorted(ranks.items()) if one.stopped)
        if stopped:
            text = "\n".join([f"{about}, and cannot end.", *(_what(rank, ranks, lost) for rank in stopped[:SHOWN])])
            return Verdict(STOPPED, stopped, operation.name, seconds, text, waiting)
        if lost:
            return Verdict(LOST, tuple(lost), operation.name, seconds, f"{about}. {_lost_text(lost)}", waiting)
        link = [line for line in slow if "link" in line]
        if link:
            return Verdict(SLOW_LINK, (), operation.name, seconds, f"{about}. {link[-1]}.", waiting)
        return Verdict(NOTHING, (), operation.name, seconds, f"{about}; its bytes are being moved.", waiting)
    if lost:
        return Verdict(LOST, tuple(lost), "", 0.0, _lost_text(lost))
    stopped = tuple(rank for rank, one in sorted(ranks.items()) if one.stopped)
    if stopped:
        return Verdict(STOPPED, stopped, "", 0.0, "\n".join(_what(rank, ranks, lost) for rank in stopped[:SHOWN]))
    if slow:
        kind = SLOW_LINK if "link" in slow[-1] else NOTHING
        return Verdict(kind, (), "", 0.0, f"{slow[-1]}.")
    return Verdict(NOTHING, (), "", 0.0, "No rank waits for another one.")


def _disagreement(waits: Mapping[int, Wait], ranks: Mapping[int, Facts]) -> Verdict:
    """All ranks wait, in a circle: they have submitted different operations.

    If they have run these operations before, the order of that time tells which one is next: a rank that is elsewhere
    has left it out. Else most ranks are right.
    """
    by_operation: dict[tuple[int, str], list[int]] = {}
    for rank, wait in sorted(waits.items()):
        by_operation.setdefault((wait.operation.group, wait.operation.name), []).append(rank)
    following = {(one.group, one.name) for facts in ranks.values() for one in _following(facts)}
    order = sorted(by_operation.items(), key=lambda entry: (entry[0] not in following, -len(entry[1]), entry[1][0]))
    (key, most), rest = order[0], order[1:]
    others = tuple(sorted(rank for _, found in rest for rank in found)) or tuple(most)  # receives of each other
    first = waits[most[0]]
    if key in following and rest:
        kind = NEVER_SUBMITTED
        text = f"{_count('rank', others)} left out {title(first.operation)}, and went on to another operation."
    else:
        kind = OTHER_ORDER
        text = "the ranks wait for each other, because they run their operations in another order."
    lines = [text]
    for _, found in order[:SHOWN]:
        wait = waits[found[0]]
        line = ranks[found[0]].user_line()
        verb = "waits" if len(found) == 1 else "wait"
        about = f"{_count('rank', found)} {verb} in {title(wait.operation)} for {wait.seconds:.1f} s"
        lines.append(about + (f": {line}" if line else ""))
    return Verdict(kind, others, first.operation.name, first.seconds, "\n".join(lines), tuple(most))


def _following(facts: Facts) -> list[Operation]:
    """What followed the last time when this rank ran the operation that it has ended last: one, or none."""
    known = facts.record.operations if facts.record is not None else ()
    ended = [one for one in known if one.done_ns and not one.code and not one.between_two]
    keys = [(one.group, one.name) for one in ended]
    positions = [position for position, key in enumerate(keys[:-1]) if key == keys[-1]]
    return [ended[positions[-1] + 1]] if positions else []


def _count(word: str, ranks: Sequence[int]) -> str:
    """These ranks, in words.

    >>> _count("rank", [1]), _count("rank", [0, 1, 2])
    ('rank 1', 'ranks 0-2')
    """
    more = " and more" if len(ranks) > MOST_RANKS else ""
    return f"{word}{'' if len(ranks) == 1 else 's'} {ranks_text(ranks[:MOST_RANKS])}{more}"


def _sentences(
    first: Wait, waiting: Sequence[int], named: Sequence[int], ranks: Mapping[int, Facts], lost: Sequence[int]
) -> str:
    verb = "waits" if len(waiting) == 1 else "wait"
    duration = f"for {first.seconds:.1f} s"
    lines = [f"{_count('rank', waiting)} {verb} for {_count('rank', named)} in {title(first.operation)} {duration}."]
    lines += [_what(rank, ranks, lost) for rank in named[:SHOWN]]
    return "\n".join(lines)


def _what(rank: int, ranks: Mapping[int, Facts], lost: Sequence[int]) -> str:
    """What a rank does that others wait for."""
    kind = _kind_of(rank, ranks, lost)
    facts = ranks.get(rank)
    if facts is None or kind == LOST:
        return f"rank {rank} is lost: {'its host does not answer' if rank in lost else 'its process has ended'}."
    who = f"rank {rank} (process {facts.pid} on {facts.host})"
    line = facts.user_line()
    where = f": {line}" if line else ""
    if kind == STOPPED:
        return f"{who} does not run: {facts.stopped}."
    if kind == LOADER:
        child = next((one for one in facts.children if one.frames), None)
        inner = next((one for one in child.frames if "/site-packages/" not in one.file), None) if child else None
        more = ""
        if child is not None and inner is not None:
            more = f"; its worker process {child.pid} is at {inner.file}:{inner.line} in {inner.function}"
        return f"{who} has not submitted it: it waits for its data loader{where}{more}"
    if kind == FILES:
        return f"{who} has not submitted it: it waits for a file{where}"
    if kind == LOCK:
        return f"{who} has not submitted it: it waits for a lock{where}"
    doing = "it computes" if facts.busy >= 0.5 else "it sleeps" if "nanosleep" in facts.wait else "it is elsewhere"
    if facts.waits_in_an_operation:
        doing = f"it waits in {title(facts.pending[0])}"
    ended = facts.record is not None and not facts.frames and facts.answered
    return f"{who} has not submitted it: {'it is at its end' if ended else doing}{where}"


def _lost_text(lost: Sequence[int]) -> str:
    return f"{_count('rank', lost)} cannot be asked: the host does not answer."


def title(operation: Operation) -> str:
    """An operation in a few words."""
    shape = f" {list(operation.shape)}" if operation.dimensions and operation.dimensions <= 4 else ""
    group = f" of process set {operation.group}" if operation.group else ""
    typed = f" {operation.dtype}{shape}" if operation.kind not in ("barrier", "join") else ""
    name = operation.name or (f"with rank {operation.peer}" if operation.peer >= 0 else "")
    return f"{operation.kind} {name!r}{typed}{group}" if operation.name else f"{operation.kind} {name}{typed}{group}"


def last_words(record: Record) -> str:
    """What a rank did last, from what its process left."""
    known = [one for one in record.operations if one.kind != "tune"]
    ended = [one for one in known if one.code == 0 and one.done_ns]
    text = f"had ended {record.finished} operation{'' if record.finished == 1 else 's'}"
    if ended:
        text += f"; the last one was {title(ended[-1])}"
    left = [one for one in known if one.pending or one.code]
    return text + (f"; it was in {title(left[-1])}" if left and left[-1] is known[-1] else "")


def mismatch(records: Mapping[int, Record]) -> Verdict | None:
    """The rank whose operation differed from that of the others, when the job failed because of it."""
    failed = {
        rank: one.operations[-1]
        for rank, one in records.items()
        if one.operations and one.operations[-1].code == PRECONDITION
    }
    if len(failed) < 2 or len({(one.group, one.name) for one in failed.values()}) > 1:
        return None
    by_form: dict[str, list[int]] = {}
    for rank, operation in sorted(failed.items()):
        by_form.setdefault(title(operation), []).append(rank)
    order = sorted(by_form.items(), key=lambda entry: (-len(entry[1]), entry[1][0]))
    if len(order) < 2:
        return None
    parts = [f"{_count('rank', ranks)} submitted {form}" for form, ranks in order[:SHOWN]]
    others = tuple(sorted(rank for _, ranks in order[1:] for rank in ranks))
    name = next(iter(failed.values())).name
    return Verdict(OTHER_SHAPE, others, name, 0.0, "; ".join(reversed(parts)), tuple(order[0][1]))


def states(ranks: Mapping[int, Facts]) -> list[str]:
    """A line for each rank: what it does."""
    lines = []
    for rank, facts in sorted(ranks.items()):
        pending = facts.pending
        if facts.stopped:
            doing = facts.stopped
        elif facts.record is None:
            doing = "has not called init()"
        elif pending and facts.waits_in_an_operation:
            doing = f"waits in {title(pending[0])} for {facts.age(pending[0]):.1f} s"
        else:
            doing = "runs" + (f", with {title(pending[0])} for {facts.age(pending[0]):.1f} s" if pending else "")
        done = facts.record.finished if facts.record is not None else 0
        line = facts.user_line()
        lines.append(f"rank {rank} on {facts.host}: {doing}" + (f" ({line})" if line else "") + f"; {done} done")
    return lines
