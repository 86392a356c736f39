"""Where profiles are kept, and which one fits: those of `state_dir`, then those that are installed with the product.
Knows no ranks and no terminal."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from configs.load import BUNDLED
from runtime.profile.document import Identity, Profile
from runtime.profile.identity import differences, digest
from runtime.replaced_file import replace_text
from runtime.verification.view import ProfileState, ProfileStatus

log = logging.getLogger(__name__)

FOLDER = "profiles"
"""Of `state_dir` and of the configs package."""
CLOCKS_DIFFER_DAYS = 1.0
"""A profile from further in the future tells nothing of its age."""
REMEDY = "measure one with `outrider profile` and the settings of this server, or set speculation.measure_profile"


class ProfileFileError(ValueError):
    """A file is no profile. The text names the file, the field and the problem."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A profile and where it is."""

    path: Path
    profile: Profile


def profile_path(state_dir: Path, identity: Identity) -> Path:
    """Where the profile of a deployment is kept: one, the newest."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", f"{identity.model_type}-{identity.devices[0]}").strip("-")
    layout = f"dp{identity.dp}tp{identity.tp}ep{identity.ep}"
    return state_dir / FOLDER / f"{slug}-{layout}-{digest(identity)}.json"


def write(profile: Profile, path: Path) -> None:
    """Replaces the file at once, so that none is left half written; makes its folder. Raises OSError."""
    replace_text(path, profile.model_dump_json(indent=1) + "\n")


def read(path: Path) -> Profile:
    """Raises ProfileFileError."""
    try:
        return Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ProfileFileError(f"{path}: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise ProfileFileError(f"{path}: not a hardware profile of this version: {field}: {first['msg']}") from None


def find(
    state_dir: Path, identity: Identity, *, now: datetime, max_age_days: float, explicit: Path | None = None
) -> tuple[Kept | None, ProfileStatus]:
    """The profile to use, and why; None with everything but OK.

    identity: of the deployment. explicit: the only file to look at, where one is named. now: with a time zone. A file
    that cannot be read is named in the log and passed over.
    """
    if explicit is not None:
        try:
            candidates = [Kept(explicit, read(explicit))]
        except ProfileFileError as error:
            return None, _status(ProfileState.MISSING, f"speculation.profile cannot be used: {error}; {REMEDY}")
    else:
        candidates = list(kept_profiles(state_dir))
    if not candidates:
        return None, _status(ProfileState.MISSING, f"there is no profile under {state_dir / FOLDER}; {REMEDY}")
    fitting = [found for found in candidates if found.profile.identity == identity]
    if not fitting:
        return None, _foreign(candidates, identity)
    fresh = [found for found in fitting if -CLOCKS_DIFFER_DAYS <= found.profile.age_days(now) <= max_age_days]
    if not fresh:
        age = fitting[0].profile.age_days(now)
        detail = (
            f"{fitting[0].path} is {age:.1f} days old, speculation.profile_max_age_days is {max_age_days:g}; {REMEDY}"
        )
        return None, _status(ProfileState.STALE, detail)
    return fresh[0], ok_status(fresh[0])


def kept_profiles(state_dir: Path) -> Iterator[Kept]:
    """All that can be read, newest first; those of `state_dir` before those that are installed."""
    yield from _newest_first(state_dir / FOLDER)
    yield from _newest_first(BUNDLED / FOLDER)


def ok_status(found: Kept) -> ProfileStatus:
    return _status(ProfileState.OK, f"{found.path}, measured {found.profile.created.isoformat()}")


def missing_status(reason: str) -> ProfileStatus:
    return _status(ProfileState.MISSING, reason)


def _newest_first(folder: Path) -> list[Kept]:
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(Kept(path, read(path)))
        except ProfileFileError as error:
            log.warning("a hardware profile is passed over: %s", error)
    return sorted(found, key=lambda one: one.profile.created, reverse=True)


def _foreign(candidates: list[Kept], identity: Identity) -> ProfileStatus:
    """Names the one that is nearest."""
    nearest = min(candidates, key=lambda found: len(differences(found.profile.identity, identity)))
    told = "; ".join(differences(nearest.profile.identity, identity))
    return _status(ProfileState.FOREIGN, f"{nearest.path} is of another deployment: {told}; {REMEDY}")


def _status(state: ProfileState, detail: str) -> ProfileStatus:
    return ProfileStatus(state=state, detail=detail)
