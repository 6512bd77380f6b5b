"""The profiles of the pool on the broker's disk: one JSON file a worker.

Covers: keeping them over a restart of the broker. Not covered: who is in (`members.py`).

Invariant: a file is written whole or not at all; one that cannot be read is left alone and skipped.
"""

import json
import logging
import os
from pathlib import Path
from typing import Final

from fusion_dask.broker.members import Hello, Member
from fusion_dask.errors import ProfileError
from fusion_dask.planner.profile import profile_from_json, profile_to_json

__all__ = ["keep", "recall"]

logger = logging.getLogger(__name__)

REASON: Final = "was here before the broker started"


def keep(folder: Path, member: Member) -> None:
    """Write what is known of a member; blocking."""
    assert member.profile is not None
    folder.mkdir(parents=True, exist_ok=True)
    plain = {
        "provider": member.hello.provider,
        "device": member.hello.device,
        "since": member.since,
        "profile": profile_to_json(member.profile),
    }
    path = folder / f"{member.hello.name}.json"
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(plain, indent=1))
    partial.replace(path)


def recall(folder: Path) -> list[Member]:
    """The members that were kept, as having left."""
    members = []
    for path in sorted(folder.glob("*.json")):
        try:
            plain = json.loads(path.read_text())
            profile = profile_from_json(plain["profile"])
            hello = Hello(
                name=path.stem,
                provider=str(plain["provider"]),
                device=str(plain["device"]),
                kind=profile.kind,
                backup=False,
                probes=True,
            )
            since = float(plain["since"])
        except (OSError, ValueError, KeyError, TypeError, ProfileError) as error:
            logger.warning("the profile %s is skipped: %s", path.name, error)
            continue
        members.append(
            Member(
                hello=hello, address="", state="left", since=since, reason=REASON, profile=profile
            )
        )
    return members
