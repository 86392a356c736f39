"""The exact joint law of what requests emit over planned steps: host, admission, verification and noise as they serve.

    step 1      the prompts' first tokens, and drafts of the length that the host has decided
    steps 2 …   the host decides from what steps before brought; admission spends its budget on the drafts that wait;
                verification; new drafts; the host learns

Every draft and every verdict is a branch with its exact weight, every branch has a host of its own, and at the end the
target alone continues each output. What is wrong on purpose, for controls, is injected: another host, another
admission, another identity of noise. Knows no policy and no cost.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Protocol, TypeVar

import numpy as np
import torch
from admission.rounds import Identity, Judged, Known, Rounds
from draft.admission_laws import ONE, JointLaw, Lengths, RequestModel, Tokens, continued
from sampling.exact_laws import total_variation

from runtime.request import Request, SamplingParams, StopParams
from runtime.settlement import Outcome
from runtime.verification.speculation import Load, Speculation, Traits
from workers.draft.admit import admit
from workers.draft.confidence import SCORE_LIMIT, Calibrator
from workers.plan import BatchPlan, Calibration, StepPlan, temperature_class
from workers.sampling.randomness import KeyUse

X = TypeVar("X")

TEMPERATURE = 1.0
PROMPT = (0,)


class Host(Protocol):
    """What plans and learns; `PolicyPlanner` is one."""

    def decide(self, step_id: int, loads: Sequence[Load]) -> Speculation: ...

    def learn(self, plan: StepPlan, rounds: Sequence[tuple[Request, Outcome]], *, measured_s: float) -> None: ...

    def catch_up(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What admission of one data-parallel rank may see, and for the wrong ones more. Rows are sequences."""

    uids: tuple[int, ...]
    prefixes: tuple[Tokens, ...]
    drafts: tuple[Tokens, ...]
    confidences: tuple[tuple[float, ...], ...]
    budget: int
    forced: tuple[int, ...]
    floor: float

    @property
    def num_drafts(self) -> tuple[int, ...]:
        return tuple(map(len, self.drafts))


Admission = Callable[[Look], list[tuple[Fraction, Lengths]]]
"""How many drafts of each sequence are verified, as a law: the wrong ones may cast lots."""


def as_served(look: Look) -> list[tuple[Fraction, Lengths]]:
    """`admit` itself."""
    width = max(look.num_drafts, default=0)
    confidence_BG = np.array([[*row, *[np.nan] * (width - len(row))] for row in look.confidences], dtype=np.float32)
    admitted = admit(
        confidence_BG.reshape(len(look.uids), width),
        np.array(look.num_drafts),
        np.array(look.uids),
        look.budget,
        np.array(look.forced),
        look.floor,
    )
    return [(ONE, tuple(admitted.tolist()))]


@dataclass(frozen=True, slots=True)
class Branch:
    """One request on one path: what it has emitted, and the drafts that wait with what admission knows of them."""

    emitted: Tokens = ()
    drafts: Tokens = ()
    scores: tuple[float, ...] = ()
    confidences: tuple[float, ...] = ()
    known: Known = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A step as a host learns of it."""

    plan: StepPlan
    rounds: tuple[tuple[Request, Outcome], ...]
    measured_s: float


@dataclass(slots=True, kw_only=True)
class Watch:
    """What was decided and admitted on some path, by step."""

    gammas: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    budgets: dict[int, set[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(set))
    lengths: dict[int, set[Lengths]] = field(default_factory=lambda: defaultdict(set))
    calibrations: dict[int, set[Calibration]] = field(default_factory=lambda: defaultdict(set))
    num_branches: int = 0


@dataclass(slots=True, kw_only=True)
class World:
    """models: of the requests, whose uids are 1, 2, …; homes: their data-parallel ranks. max_tokens: of each request,
    with the first. step_ids: of the steps, the first one with the prompts. gamma_max: of the ranks.

    seconds: how long a step took, of its plan and of the drafts drawn in it, request by request.
    """

    models: Sequence[RequestModel]
    host: Callable[[], Host]
    max_tokens: int
    step_ids: Sequence[int]
    gamma_max: int = 2
    vocab_size: int = 2
    homes: Sequence[int] = (0, 0)
    admission: Admission = as_served
    identity: Identity = lambda key: key
    keeps: Callable[[KeyUse], bool] = lambda key: False
    seconds: Callable[[StepPlan, Sequence[Tokens]], float] = lambda plan, drawn: 0.002
    watch: Watch = field(default_factory=Watch)
    _rounds: list[Rounds] = field(init=False)
    _requests: list[Request] = field(init=False)
    _turns: dict[tuple[int, Turn], int] = field(init=False, default_factory=dict)
    _hosts: dict[int, Host] = field(init=False, default_factory=dict)
    _decided: dict[tuple[int, tuple[Load, ...]], tuple[Speculation, Host]] = field(init=False, default_factory=dict)
    _calibrator: Calibrator = field(init=False)

    def __post_init__(self) -> None:
        depth = self.max_tokens + self.gamma_max
        self._rounds = [
            Rounds(model, 10 + i, self.vocab_size, depth, self.identity, self.keeps)
            for i, model in enumerate(self.models)
        ]
        self._requests = [
            Request(
                uid=1 + i,
                request_id=str(1 + i),
                prompt=PROMPT,
                sampling=SamplingParams(temperature=TEMPERATURE, seed=10 + i),
                stopping=StopParams(max_tokens=self.max_tokens),
            )
            for i in range(len(self.models))
        ]
        self._calibrator = Calibrator(self.gamma_max, torch.device("cpu"))

    def law(self) -> JointLaw:
        """Of the outputs of all requests, `max_tokens` long."""
        states: dict[tuple[tuple[Branch, ...], int], Fraction] = {(tuple(Branch() for _ in self.models), 0): ONE}
        last = self.step_ids[-1]
        for step_id in self.step_ids:
            after: dict[tuple[tuple[Branch, ...], int], Fraction] = defaultdict(Fraction)
            for (branches, past), weight in states.items():
                for state, share in self._step(step_id, branches, past, is_last=step_id == last):
                    after[state] += weight * share
            states = after
            self.watch.num_branches += len(states)
        return self._completed(states)

    def bias(self, num_tokens: int | None = None) -> Fraction:
        """Total variation between the joint law of the first tokens (all of them unless a number is given) and the
        target's."""
        length = num_tokens or self.max_tokens
        target = dict(_products([continued((), self.max_tokens, model.p) for model in self.models]))
        return total_variation(_cut(self.law(), length), _cut(target, length))

    def _step(
        self, step_id: int, branches: tuple[Branch, ...], past: int, *, is_last: bool
    ) -> Iterator[tuple[tuple[tuple[Branch, ...], int], Fraction]]:
        live = [i for i, branch in enumerate(branches) if len(branch.emitted) < self.max_tokens]
        if not live:
            yield (branches, past), ONE
            return
        speculation, host = self._decide(step_id, past, self._loads(branches, live))
        self.watch.gammas[step_id].add(speculation.gamma)
        self.watch.calibrations[step_id].add(speculation.calibration)
        plan = self._plan(step_id, branches, live, speculation)
        if any(branches[i].drafts for i in live):
            self.watch.budgets[step_id].add(tuple(batch.verify_budget for batch in plan.batches))
        for chance, lengths in self._admitted(branches, live, plan):
            self.watch.lengths[step_id].add(tuple(lengths.values()))
            laws = [self._judged(i, branches[i], lengths[i], step_id) for i in live]
            for verdicts, mass in _products(laws):
                met = dict(zip(live, verdicts, strict=True))
                rounds = tuple((self._requests[i], self._outcome(i, branches[i], lengths[i], met[i][0])) for i in live)
                ahead = [
                    self._drafted(i, branches, met, plan, speculation, is_last=is_last) for i in range(len(branches))
                ]
                for next_branches, share in _products(ahead):
                    at = past
                    if not is_last:
                        drawn = [branch.drafts for branch in next_branches]
                        at = self._past(past, Turn(plan, rounds, self.seconds(plan, drawn)), host)
                    yield (next_branches, at), chance * mass * share

    def _loads(self, branches: Sequence[Branch], live: Sequence[int]) -> tuple[Load, ...]:
        traits = Traits(0, temperature_class(TEMPERATURE), None)
        loads = []
        for rank in range(1 + max(self.homes[: len(branches)])):
            mine = [i for i in live if self.homes[i] == rank]
            decodes = [i for i in mine if branches[i].emitted]
            entering = tuple(1 + i for i in mine if not branches[i].emitted)
            loads.append(
                Load(
                    uids=tuple(1 + i for i in decodes),
                    traits=(traits,) * len(decodes),
                    waiting=tuple(len(branches[i].drafts) for i in decodes),
                    committed=tuple(len(PROMPT) + len(branches[i].emitted) - 1 for i in decodes),
                    left=tuple(self.max_tokens - len(branches[i].emitted) for i in decodes),
                    entering=entering,
                    entering_traits=(traits,) * len(entering),
                    num_prompt_rows=len(PROMPT) * len(entering),
                )
            )
        return tuple(loads)

    def _decide(self, step_id: int, past: int, loads: tuple[Load, ...]) -> tuple[Speculation, Host]:
        if (past, loads) not in self._decided:
            if past not in self._hosts:
                self._hosts[past] = self.host()
            host = copy.deepcopy(self._hosts[past])
            self._decided[past, loads] = host.decide(step_id, loads), host
        return self._decided[past, loads]

    def _past(self, past: int, turn: Turn, host: Host) -> int:
        """The number of what went before with one more step. host: as it was once it had decided that step."""
        if (past, turn) not in self._turns:
            self._turns[past, turn] = number = 1 + len(self._turns)
            learnt = copy.deepcopy(host)
            learnt.learn(turn.plan, turn.rounds, measured_s=turn.measured_s)
            learnt.catch_up()  # a server that comes to it later decides by less
            self._hosts[number] = learnt
        return self._turns[past, turn]

    def _plan(
        self, step_id: int, branches: Sequence[Branch], live: Sequence[int], speculation: Speculation
    ) -> StepPlan:
        batches = []
        for rank, share in enumerate(speculation.batches):
            mine = [i for i in live if self.homes[i] == rank]
            batches.append(
                BatchPlan(
                    slots=tuple(1 + i for i in mine),
                    epochs=tuple(1 + i for i in mine),
                    num_known=(1,) * len(mine),
                    num_drafts=tuple(len(branches[i].drafts) for i in mine),
                    num_forced=tuple(min(len(branches[i].drafts), share.forced.get(1 + i, 0)) for i in mine),
                    samples=(True,) * len(mine),
                    max_committed=tuple(len(branches[i].emitted) for i in mine),
                    num_unfed=(0,) * len(mine),
                    verify_budget=share.verify_budget,
                )
            )
        return StepPlan(
            step_id=step_id,
            epoch=1,
            batches=tuple(batches),
            gamma=speculation.gamma,
            feed_drafter=speculation.feed_drafter,
            calibration=speculation.calibration,
            min_survival=speculation.min_survival,
        )

    def _admitted(
        self, branches: Sequence[Branch], live: Sequence[int], plan: StepPlan
    ) -> Iterator[tuple[Fraction, dict[int, int]]]:
        laws = []
        for batch in plan.batches:
            mine = [slot - 1 for slot in batch.slots]
            look = Look(
                uids=tuple(1 + i for i in mine),
                prefixes=tuple(branches[i].emitted for i in mine),
                drafts=tuple(branches[i].drafts for i in mine),
                confidences=tuple(branches[i].confidences for i in mine),
                budget=batch.verify_budget,
                forced=batch.num_forced,
                floor=plan.min_survival,
            )
            laws.append([(chance, dict(zip(mine, lengths, strict=True))) for chance, lengths in self.admission(look)])
        for parts in product(*laws):
            chance = ONE
            lengths: dict[int, int] = {}
            for share, part in parts:
                chance, lengths = chance * share, lengths | part
            yield chance, {i: lengths[i] for i in live}

    def _judged(self, i: int, branch: Branch, num_admitted: int, step_id: int) -> dict[tuple[Judged, Known], Fraction]:
        return dict(self._rounds[i].judge(branch.emitted, branch.drafts, num_admitted, step_id, branch.known))

    def _outcome(self, i: int, branch: Branch, num_admitted: int, judged: Judged) -> Outcome:
        return Outcome(
            dp_rank=self.homes[i],
            slot=1 + i,
            epoch=1 + i,
            num_known=1,
            num_drafts=len(branch.drafts),
            samples=True,
            drafted=branch.drafts,
            num_admitted=num_admitted,
            num_accepted=judged.num_accepted,
            emitted=judged.emitted[: self.max_tokens - len(branch.emitted)],
            scores=branch.scores,
            acceptance=judged.acceptance,
        )

    def _drafted(
        self,
        i: int,
        branches: Sequence[Branch],
        met: dict[int, tuple[Judged, Known]],
        plan: StepPlan,
        speculation: Speculation,
        *,
        is_last: bool,
    ) -> dict[Branch, Fraction]:
        """The request after the step, with the drafts drawn at its end."""
        if i not in met:
            return {branches[i]: ONE}
        judged, known = met[i]
        emitted = (*branches[i].emitted, *judged.emitted)[: self.max_tokens]
        if is_last or len(emitted) == self.max_tokens:
            return {Branch(emitted): ONE}
        limits = speculation.batches[self.homes[i]].limits
        gamma = min(plan.gamma, limits.get(1 + i, plan.gamma)) if plan.feed_drafter else 0
        law: dict[Branch, Fraction] = defaultdict(Fraction)
        for (drafts, noise), mass in self._rounds[i].draw(emitted, gamma, plan.step_id, known).items():
            scores, confidences = self._scored(i, emitted, drafts, plan.calibration)
            law[Branch(emitted, drafts, scores, confidences, noise)] += mass
        return law

    def _scored(
        self, i: int, emitted: Tokens, drafts: Tokens, calibration: Calibration
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Scores and confidences of drafts, each of what was there before its draft, as a rank calibrates them."""
        raw = [self.models[i].confidence((*emitted, *drafts[:j])) for j in range(len(drafts))]
        scores = np.array([_log_odds(value) for value in raw], dtype=np.float32)
        kind = torch.tensor([temperature_class(TEMPERATURE)])
        confidences = [
            float(self._calibrator.confidence(torch.tensor([score]), kind, j, calibration))
            for j, score in enumerate(scores)
        ]
        return tuple(scores.tolist()), tuple(confidences)

    def _completed(self, states: dict[tuple[tuple[Branch, ...], int], Fraction]) -> JointLaw:
        runs: JointLaw = defaultdict(Fraction)
        for (branches, _), weight in states.items():
            runs[tuple(branch.emitted for branch in branches)] += weight
        law: JointLaw = defaultdict(Fraction)
        for emitted, weight in runs.items():
            tails = [
                continued(tokens, self.max_tokens, model.p) for tokens, model in zip(emitted, self.models, strict=True)
            ]
            for outputs, mass in _products(tails):
                law[outputs] += weight * mass
        return dict(law)


def _products(laws: Sequence[dict[X, Fraction]]) -> Iterator[tuple[tuple[X, ...], Fraction]]:
    """The law of independent things together."""
    for combination in product(*(law.items() for law in laws)):
        mass = ONE
        for _, share in combination:
            mass *= share
        yield tuple(value for value, _ in combination), mass


def _cut(law: JointLaw, num_tokens: int) -> JointLaw:
    shorter: JointLaw = defaultdict(Fraction)
    for outputs, mass in law.items():
        shorter[tuple(tokens[:num_tokens] for tokens in outputs)] += mass
    return dict(shorter)


def _log_odds(confidence: float) -> float:
    """The score that the identity makes this confidence of, within the limits of scores."""
    if not 0 < confidence < 1:
        return SCORE_LIMIT if confidence >= 1 else -SCORE_LIMIT
    return float(np.clip(np.log(confidence / (1 - confidence)), -SCORE_LIMIT, SCORE_LIMIT))
