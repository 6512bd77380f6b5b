"""Who is in the pool: a pure membership, state + event -> state.

    probing -> active | backup -> draining -> left

A worker says hello (probing), is measured (active, or backup if its provider lends it as
one), may be asked to leave (draining: it gets no new stage) and leaves. Nothing here knows Dask or the
clock; times are Unix seconds and come with the event.

Not covered: suspects and the promotion of a backup. Invariant: one member a name; what left stays known,
with the reason, until its name comes back or `REMEMBERED` others have left since.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fusion_dask.planner.profile import Profile

__all__ = ["REMEMBERED", "Hello", "Member", "Members", "State"]

State = Literal["probing", "active", "backup", "draining", "left"]

#: Members that have left and are still shown.
REMEMBERED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a worker says of itself when it joins.

    Attributes:
        name: Unique name of the worker.
        provider: Name of the machine that lends it.
        device: Identity of its device: a UUID, or `cpu`.
        kind: `cuda`, `rocm`, `mps` or `cpu`.
        backup: Whether it is lent for the backup pool only.
        probes: Whether it is going to report a profile.
    """

    name: str
    provider: str
    device: str
    kind: str
    backup: bool
    probes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker of the pool, as of its last event."""

    hello: Hello
    address: str
    state: State
    since: float
    reason: str
    profile: Profile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """All members by name. Every event gives a new one.

    >>> hello = Hello(name="a-0", provider="a", device="cpu", kind="cpu", backup=False, probes=False)
    >>> pool = Members().joined(hello, "tls://a:1", now=5.0)
    >>> pool.by_name["a-0"].state, pool.drained("a", now=6.0).by_name["a-0"].state
    ('active', 'draining')
    """

    by_name: Mapping[str, Member] = field(default_factory=dict)

    def joined(self, hello: Hello, address: str, *, now: float) -> "Members":
        """A worker said hello; what was measured under its name before is kept until it is new."""
        known = self.by_name.get(hello.name)
        state: State = "probing" if hello.probes else _ready(hello)
        member = Member(
            hello=hello,
            address=address,
            state=state,
            since=now,
            reason="joined",
            profile=None if known is None else known.profile,
        )
        return self._with(member)

    def profiled(self, address: str, profile: Profile, *, now: float) -> "Members":
        """A worker was measured; one that was never seen or has left changes nothing."""
        member = self.at(address)
        if member is None:
            return self
        if member.state == "probing":
            member = replace(member, state=_ready(member.hello), since=now, reason="measured")
        return self._with(replace(member, profile=profile))

    def drained(self, provider: str, *, now: float) -> "Members":
        """A provider wants its workers back: they get no new stage."""
        pool = self
        for member in self.by_name.values():
            if member.hello.provider == provider and member.state not in {"draining", "left"}:
                reason = "its provider takes it back"
                pool = pool._with(replace(member, state="draining", since=now, reason=reason))
        return pool

    def left(self, address: str, reason: str, *, now: float) -> "Members":
        """A worker is gone."""
        member = self.at(address)
        if member is None:
            return self
        if member.state == "draining":
            reason = member.reason
        return self._with(replace(member, state="left", since=now, reason=reason))._trimmed()

    def at(self, address: str) -> Member | None:
        """The member with this address, unless it has left."""
        for member in self.by_name.values():
            if member.address == address and member.state != "left":
                return member
        return None

    def of_provider(self, provider: str) -> list[Member]:
        """The present workers of a provider."""
        return [
            member
            for member in self.by_name.values()
            if member.hello.provider == provider and member.state != "left"
        ]

    def _with(self, member: Member) -> "Members":
        return Members(by_name={**self.by_name, member.hello.name: member})

    def _trimmed(self) -> "Members":
        gone = sorted(
            (m for m in self.by_name.values() if m.state == "left"), key=lambda member: member.since
        )
        forgotten = {member.hello.name for member in gone[: max(0, len(gone) - REMEMBERED)]}
        return Members(by_name={n: m for n, m in self.by_name.items() if n not in forgotten})


def _ready(hello: Hello) -> State:
    return "backup" if hello.backup else "active"
