"""The state of the pool as plain data, for `fusion status`, dashboards and the planner: pure."""

from typing import Any

from fusion_dask.broker.contribution import Contributions
from fusion_dask.broker.directory import Directory
from fusion_dask.broker.members import Member, Members
from fusion_dask.planner.profile import profile_to_json

__all__ = ["status_of"]


def status_of(
    members: Members, directory: Directory, contributions: Contributions, *, now: float
) -> dict[str, Any]:
    """Members by name with what they hold and contribute; times are Unix seconds."""
    return {
        "time": now,
        "members": [
            _member(member, directory, contributions)
            for _, member in sorted(members.by_name.items())
        ],
    }


def _member(member: Member, directory: Directory, contributions: Contributions) -> dict[str, Any]:
    held = [] if member.state == "left" else directory.held_by(member.address)
    rates = [contributions.tokens_per_s(run, stage) for run, stage in held]
    known = [rate for rate in rates if rate is not None]
    return {
        "name": member.hello.name,
        "provider": member.hello.provider,
        "device": member.hello.device,
        "kind": member.hello.kind,
        "address": member.address,
        "state": member.state,
        "since": member.since,
        "reason": member.reason,
        "profile": None if member.profile is None else profile_to_json(member.profile),
        "stages": [{"run": run, "stage": stage} for run, stage in held],
        "tokens_per_s": sum(known) if known else None,
    }
