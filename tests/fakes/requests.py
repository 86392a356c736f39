"""Requests for tests of the engine and the scheduler, with everything defaulted."""

from __future__ import annotations

from fakes.worker import EOS

from runtime.request import ReportParams, Request, SamplingParams, StopParams


def request(
    uid: int,
    *,
    num_prompt: int = 3,
    max_tokens: int = 8,
    priority: int = 0,
    stop_strings: tuple[str, ...] = (),
    eos: bool = False,
    stop_token_ids: tuple[int, ...] = (),
    request_id: str | None = None,
    report_rounds: bool = False,
    prompt_of: int | None = None,
    max_drafts: int | None = None,
    time_limit_s: float | None = None,
    n: int = 1,
) -> Request:
    """A greedy request whose prompt, and so whose tokens, follow from its uid, or from that of `prompt_of`. Without
    `eos` it runs to max_tokens."""
    source = uid if prompt_of is None else prompt_of
    return Request(
        uid=uid,
        request_id=request_id or f"request-{uid}",
        prompt=tuple((7 * source + 3 * i) % 60 + 1 for i in range(num_prompt)),
        sampling=SamplingParams(temperature=0.0, seed=uid),
        stopping=StopParams(
            max_tokens=max_tokens,
            eos_token_ids=(EOS,) if eos else (),
            stop_token_ids=stop_token_ids,
            stop_strings=stop_strings,
            time_limit_s=time_limit_s,
        ),
        priority=priority,
        report=ReportParams(rounds=report_rounds),
        max_drafts=max_drafts,
        n=n,
    )
