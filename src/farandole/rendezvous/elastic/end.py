# Decides whether an elastic job has ended, and why.
# Pure: looks at the state and changes nothing.
"""`end_of_job(state)` returns `Over` when there is nothing left to wait for, or when waiting took too long."""

from __future__ import annotations

from farandole.rendezvous.elastic import policy
from farandole.rendezvous.elastic.members import Over, Status, Worker
from farandole.rendezvous.elastic.state import JobState

ALL_LEFT_OUT = (
    "every host has been left out, because a rank failed on each (--blacklist host; with --blacklist slot, or with "
    "--blacklist-cooldown-range, ranks are started there again)"
)


def end_of_job(state: JobState) -> Over | None:
    """The end of the job; None while it continues."""
    alive = [w for w in state.workers.values() if w.status is not Status.ENDED and not w.dismissed]
    if state.finishing:
        left = [w for w in alive if w.status is not Status.OUT and w.generation + (w.status is Status.MEMBER) > 0]
        return None if left else Over(failed=False, text="")
    if not alive and state.hosts and all(state.left_out.get(name) == float("inf") for name in state.hosts):
        return Over(failed=True, text=ALL_LEFT_OUT)
    if state.runs:
        if not any(map(state.holds, alive)):
            if state.drained and not any(host.usable for host in state.hosts.values()):
                return Over(failed=False, text="")
            return Over(failed=True, text="every rank that had the state of the job has ended")
    elif over := _before_the_first_generation(state, alive):
        return over
    if state.below_since is not None and state.now >= state.below_since + state.limits.elastic_timeout:
        return Over(failed=True, text=_too_few(state))
    return None


def _before_the_first_generation(state: JobState, alive: list[Worker]) -> Over | None:
    if state.early and not [w for w in alive if w.status is not Status.READY]:
        if alive:
            text = f"{state.early}, and {len(alive)} others wait for it: each rank has to call init()"
            return Over(failed=True, text=text)
        return Over(failed=False, text="")  # the command is no training
    if not [w for w in alive if w.status is not Status.STARTING]:
        slots = [slot for host in state.hosts.values() for slot in host.slots]
        if slots and sum(slot.failures for slot in slots) >= max(policy.MAX_FAILURES_AT_START, len(slots)):
            return Over(failed=True, text="every rank failed before the first generation began")
    return None


def _too_few(state: JobState) -> str:
    need = state.limits.min_np if state.runs else state.limits.np
    which = "--min-np" if state.runs else "-np"
    slots = sum(host.slot_count for host in state.hosts.values() if state.usable(host))
    down = [host.name for host in state.hosts.values() if host.listed and not host.usable]
    text = (
        f"only {len(state.ready())} of the {need} ranks of {which} are there after {state.limits.elastic_timeout:g} s "
        f"(--elastic-timeout); the hosts that can be reached have {slots} slots"
    )
    out = [host.name for host in state.hosts.values() if host.name in state.left_out]
    text += f"; left out, because a rank failed there (--blacklist host): {', '.join(out)}" if out else ""
    return text + (f"; not reached: {', '.join(down)}" if down else "")
