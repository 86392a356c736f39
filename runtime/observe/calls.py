"""How the log names a call, and the record of one that ends before the engine has taken it in. Knows no gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from runtime.observe.logs import naming
from runtime.observe.records import Observer, RequestRecord, code_of, code_of_leaving, field_of
from runtime.request import Origin


@dataclass(slots=True)
class CallNote:
    """is_taken_in: the engine knows the request, and will make the record of its end."""

    is_taken_in: bool = False


@contextmanager
def recorded(
    observer: Observer, request_id: str, origin: Origin, clock: Callable[[], float] = time.monotonic
) -> Iterator[CallNote]:
    """Names the call in all that is logged inside, and tells the observer of an error that leaves the block before the
    call was taken in, be it only that the client has left. request_id: "" where it has none yet."""
    began_s = clock()
    note = CallNote()
    try:
        with naming(request_id=request_id, identity=origin.identity, face=origin.face):
            yield note
    except BaseException as error:
        if not note.is_taken_in:
            ended_s = clock()
            observer.note_request(
                RequestRecord(
                    request_id=request_id,
                    origin=origin,
                    code=code_of(error, code_of_leaving(origin, began_s, ended_s)),
                    field=field_of(error),
                    error=str(error),
                    submitted_s=began_s,
                    ended_s=ended_s,
                )
            )
        raise
